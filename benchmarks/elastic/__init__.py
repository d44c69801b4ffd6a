"""Ranks that are lost, join and leave, and the control path."""
