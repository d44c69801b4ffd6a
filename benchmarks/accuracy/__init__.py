"""What a recipe's techniques bring in accuracy."""
