"""Rehearsals: a planned step with real messages over a network of hosts on one machine, and timed waits for compute.

The network lab (namespaces with a given latency and bandwidth) is here too.
"""

from .rehearsal import Rehearsal, rehearse
from .scale import Ceiling, Scale, choose_scale

__all__ = ["Ceiling", "Rehearsal", "Scale", "choose_scale", "rehearse"]
