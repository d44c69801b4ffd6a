"""What a training step costs, and what watches it."""
