"""A command a claim, each against a named peer: `python -m benchmarks` lists them."""
