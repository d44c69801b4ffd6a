"""The planner: how long a recipe takes on a described cluster, where the time goes, and what to change.

Clusters and programs as data, the cost of a model, of a message and of a step, the search, and published results.
May import: errors, recipe, data, models, comm, tensor_parallel.

>>> from torusgd.plan import forecast, job_of, load_cluster, load_software, software_for
>>> from torusgd.recipe.load import load_recipe
>>> recipe = load_recipe("fujitsu-74s").recipe
>>> program = software_for(recipe, load_software("mxnet-fujitsu"))
>>> plan = forecast(job_of(recipe), load_cluster("abci"), program, devices=2048)
>>> 65 < plan.run.seconds < 85
True
"""

from .best import best
from .catalog import cluster_names, load_cluster, load_software, software_names
from .cluster import Cluster, Device, Link, Software
from .forecast import Forecast, forecast, job_of, software_for
from .model_cost import ModelCost, read_model
from .sweep import fixed_batch, fixed_share, sweep
from .timeline import StepTime, step_time

__all__ = [
    "Cluster",
    "Device",
    "Forecast",
    "Link",
    "ModelCost",
    "Software",
    "StepTime",
    "best",
    "cluster_names",
    "fixed_batch",
    "fixed_share",
    "forecast",
    "job_of",
    "load_cluster",
    "load_software",
    "read_model",
    "software_for",
    "software_names",
    "step_time",
    "sweep",
]
