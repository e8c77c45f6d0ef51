"""localmoe: run Mixture-of-Experts models larger than the GPU, exactly. Decides nothing; import from the
subpackages."""

__version__ = "0.1.0"
