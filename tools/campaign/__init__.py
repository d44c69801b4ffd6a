"""Runs of a small recipe with everything combined with everything: each pair of options, and each option with an event.

`draw.py` makes the runs of a seed, `play.py` starts one and compares its weights with the plain run's.
"""
