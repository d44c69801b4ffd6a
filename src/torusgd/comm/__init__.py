"""All-reduce over ranks: sums free of order, schedules of messages as data, engines that run them, and their cost.

Knows no recipe, no model and no optimizer, so that it works in anyone's script.
May import: errors.
"""
