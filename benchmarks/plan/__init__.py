"""What a plan is worth on this machine."""
