"""Parts for training loops that torusgd doesn't own: checks over their ranks, and callbacks of other trainers.

`replicas` and `gradient_audit` need torch.distributed alone. `lightning`, `transformers` and `accelerate` import the
library of that name, and nothing else does.
"""
