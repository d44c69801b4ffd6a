"""`torusgd eval`: what trained weights are worth on held-out images."""

from .options import TrainedWeights, takes_groups
from .output import console


@takes_groups
def evaluate(weights: TrainedWeights) -> None:
    """Print the accuracy of trained weights on held-out images."""
    from .assessment import Assessment, describe

    assessment = Assessment(weights)
    result = assessment.evaluate()
    if assessment.world.rank == 0:
        console().print(f"{assessment.trained.path}: {describe(result)}", markup=False)
