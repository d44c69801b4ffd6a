"""Rehearsals: a planned step with real messages over the network lab, and timed waits in place of compute."""

from .rehearsal import Rehearsal, rehearse
from .scale import Ceiling, Scale, choose_scale

__all__ = ["Ceiling", "Rehearsal", "Scale", "choose_scale", "rehearse"]
