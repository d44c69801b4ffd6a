import os

import torch

# Triton reads it when it is imported, which the first import of torusgd does: here, since that comes before any.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU
