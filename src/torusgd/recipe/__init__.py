"""What is computed: the recipe, typed and hashed, its YAML files and overrides, and the schedule of steps that follows.

All here is pure: the same recipe gives the same steps on any cluster.
"""
