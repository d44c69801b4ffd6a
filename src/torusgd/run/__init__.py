"""A training run on one rank: built from a job, taken from its first step to its result.

It runs on ranks that exist already; starting them is `launch`.
"""
