"""Runs of a small recipe with everything combined with everything: each pair of options, and options with events.

`draw.py` makes the runs of a seed, `play.py` carries one out and compares its weights with those of a plain run.
"""
