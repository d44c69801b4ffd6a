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

from .cluster import Cluster, Device, Link, Software, cluster_names, load_cluster, load_software, software_names
from .forecast import Forecast, Workload, forecast, workload_of
from .model_cost import ModelCost, read_model
from .program import as_torusgd, program_for
from .relaxed import RelaxedForecast, relaxed_forecasts
from .search import SearchResult, fixed_batch, fixed_share, search_settings, sweep
from .timeline import StepTime, step_time

__all__ = [
    "Cluster", "Device", "Forecast", "Link", "ModelCost", "RelaxedForecast", "SearchResult", "Software", "StepTime",
    "Workload", "as_torusgd", "cluster_names", "fixed_batch", "fixed_share", "forecast", "load_cluster",
    "load_software", "program_for", "read_model", "relaxed_forecasts", "search_settings", "software_names", "step_time",
    "sweep", "workload_of",
]  # fmt: skip
