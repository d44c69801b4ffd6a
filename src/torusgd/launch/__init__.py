"""Training on ranks: on this machine, on machines that join it, or on ranks that torchrun has started."""
