"""torusgd: training image classifiers with large mini-batches on many machines."""
