"""The planner: how long a recipe takes on a described cluster, where the time goes, and what to change.

Clusters and programs as data, the cost of a model, of a message and of a step, the search, and published results.

>>> from torusgd.plan import forecast, load_cluster, load_software, program_for, workload_of
>>> from torusgd.recipe.load import load_recipe
>>> from torusgd.recipe.runtime_options import RuntimeOptions
>>> recipe = load_recipe("fujitsu-74s").recipe
>>> abci, runtime = load_cluster("abci"), RuntimeOptions(workers=2048)
>>> program = program_for(recipe, runtime, abci, load_software("mxnet-fujitsu"))
>>> plan = forecast(workload_of(recipe), abci, program, devices=2048)
>>> 65 < plan.run.seconds < 85
True
"""

from .cluster import load_cluster, load_software
from .forecast import forecast, workload_of
from .program import as_torusgd, program_for
from .timeline import step_time

__all__ = ["as_torusgd", "forecast", "load_cluster", "load_software", "program_for", "step_time", "workload_of"]
