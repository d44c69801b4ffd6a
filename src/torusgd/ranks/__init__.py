"""Ranks of any function, started and kept: the supervisor, heartbeats, failures, generations, machines that join."""
