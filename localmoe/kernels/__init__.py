"""Compute kernels and their torch references. Importing it needs no CUDA and no Triton."""
