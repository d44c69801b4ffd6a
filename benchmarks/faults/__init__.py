"""Runs that something happens to."""
