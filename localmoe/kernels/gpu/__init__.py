"""Triton kernels: the twins of the torch references in localmoe.kernels. Importing a module here needs
Triton; no module outside imports one before it has a CUDA device."""
