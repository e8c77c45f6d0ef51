"""localmoe: run Mixture-of-Experts models larger than the GPU, exactly. Decides nothing; import from the
subpackages."""

import os

# OpenMP's threads sleep when PyTorch has nothing for them: they would spin for milliseconds on cores that
# threads which compute experts want. Read when PyTorch is imported; what is set already stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "1")

__version__ = "0.1.0"
