"""Expert products on the CPU, compiled by numba: read where the weights lie, without Python's lock. Imports
without a GPU."""
