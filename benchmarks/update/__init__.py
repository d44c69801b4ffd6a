"""Optimizer steps and sharded updates beside torch's and timm's."""
