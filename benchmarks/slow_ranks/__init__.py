"""Ranks that are slow, always or now and then."""
