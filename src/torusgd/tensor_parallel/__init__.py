"""Column-parallel linear layers: ranks in groups hold column blocks of a network's tail, with the bits of one rank.

Their layout, forward and backward pass, loss, norms and reducer are here.
"""
