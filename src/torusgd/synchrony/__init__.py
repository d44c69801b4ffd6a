"""Relaxed synchrony as mathematics: delays, barriers in virtual time, cutoffs and their predictors, DropCompute.

Pure functions of keys and of measured times; nothing here trains, sends a message or reads a clock.
"""
