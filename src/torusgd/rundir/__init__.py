"""A run's folder, on a disk or in a bucket: its files, checkpoints, status and requests."""
