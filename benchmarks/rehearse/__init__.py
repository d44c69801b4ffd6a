"""Layers that ranks share, published systems and runs in the network lab."""
