"""Starting ranks and keeping them: the supervisor, heartbeats, failures, generations of ranks, machines that join.

Knows nothing of training: a rank runs any function that it is given.
"""
