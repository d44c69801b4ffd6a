"""One training step: passes, sums, the control vector, the update, and what watches them; evaluation and polish."""
