"""Steps as CUDA graphs (the runtime option `cuda_graphs`), and exact sums by Triton's kernels, on any GPU.

It has run on one GPU (docs/gpu.md). A run on a CPU imports nothing from here, unless the option is set.

    form           what a run can have it, and the parts that it puts in place of the plain step's
    run_ahead      steps that the host launches before it knows how the last ones ended
    graphs         passes captured as CUDA graphs; the CUDA streams on which they run
    sums           exact sums that take a bucket at a time, and leave every decision to the device
    flat_weights   SGD and LARS on flat memory, as one operator
    kernels        operators of torch.ops.torusgd, and the tables that their Triton kernels read
    triton_kernels the operators as Triton kernels
"""
