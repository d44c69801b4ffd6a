"""Portable arithmetic: its errors, what it costs, and the networks that it takes."""
