"""Damaged and malicious inputs for everything in torusgd that reads, and a table of how each ended.

`mutations` makes the inputs, `inputs` has the kinds of them and what is done with each, `tally` books how they end.
"""
