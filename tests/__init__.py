import os

import torch

# CUDA is asked by way of NVML, which leaves the processes that are forked from this one theirs to begin.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Triton reads it when it is imported, which the first import of torusgd does: here, since that comes before any.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU
