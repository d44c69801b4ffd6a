"""Training in virtual time: P virtual workers in one process, with real gradients and keyed delays.

For every form of relaxed synchrony; stale and sampled barriers, gossip and elastic averaging have no other.
"""

from .simulation import Point, Setting, Simulation, simulate

__all__ = ["Point", "Setting", "Simulation", "simulate"]
