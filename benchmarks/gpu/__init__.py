"""One GPU: hashes, speed, counts of kernels; and the section of docs/benchmarks.md."""
