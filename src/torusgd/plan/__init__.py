"""The planner: how long a recipe takes on a described cluster, where the time goes, and what to change.

>>> from torusgd.plan import forecast, load_cluster, load_software, software_for, workload_of
>>> from torusgd.recipe.load import load_recipe
>>> recipe = load_recipe("fujitsu-74s").recipe
>>> program = software_for(recipe, load_software("mxnet-fujitsu"))
>>> plan = forecast(workload_of(recipe), load_cluster("abci"), program, devices=2048)
>>> 65 < plan.run.seconds < 85
True
"""

from .cluster import Cluster, Device, Link, Software, cluster_names, load_cluster, load_software, software_names
from .forecast import Forecast, Workload, forecast, software_for, workload_of
from .model_cost import ModelCost, read_model
from .search import SearchResult, fixed_batch, fixed_share, search_settings, sweep
from .timeline import StepTime, step_time

__all__ = [
    "Cluster",
    "Device",
    "Forecast",
    "Link",
    "ModelCost",
    "SearchResult",
    "Software",
    "StepTime",
    "Workload",
    "cluster_names",
    "fixed_batch",
    "fixed_share",
    "forecast",
    "load_cluster",
    "load_software",
    "read_model",
    "search_settings",
    "software_for",
    "software_names",
    "step_time",
    "sweep",
    "workload_of",
]
