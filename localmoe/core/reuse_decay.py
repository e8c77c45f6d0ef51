"""By what an expert is worth keeping, in slots (prefetch.reuse) and in RAM (experts.ram_places): R + 5 F. R
are uses that count half as much with every token, F the share of about the last hundred tokens that used it.
Either alone is worse: R on real routing, F on sticky routing (benchmarks/policy_simulations.py)."""

from __future__ import annotations

TOKEN_DECAY = 0.5  # of R, a token
FREQUENCY_DECAY = 0.99  # of F, a token
FREQUENCY_WEIGHT = 5.0
