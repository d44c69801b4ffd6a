"""All tests run with one thread, as every rank of a CPU recipe does: bits differ between one and two."""

import torch

torch.set_num_threads(1)
