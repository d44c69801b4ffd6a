"""Training in virtual time: P virtual workers in one process, with real gradients and keyed delays.

For forms of relaxed synchrony that never run on real ranks: stale and sampled barriers, gossip, elastic averaging.
May import: errors, rng, weights, recipe, data, models, optim, synchrony.
"""

from .simulation import Point, Setting, Simulation, simulate

__all__ = ["Point", "Setting", "Simulation", "simulate"]
