"""From autograd to the mean gradient: sums that don't depend on order, the reducer, its DistributedDataParallel hook.

The sharded update for people's own loops is here too.
"""
