"""A training run: it is built from a recipe, takes steps, evaluates, polishes, writes checkpoints and events.

It runs on ranks that exist already; starting them is `launch`.
May import: errors, rng, signals, untrusted, locks, weights, storage, hub, kernels, recipe, runtime, precision, data,
    models, optim, comm, gradients, tensor_parallel, synchrony.
"""
