"""A training run on one rank that exists: built from a job, taken from its first step to its result."""
