"""Policies that exist for comparisons only: by name, like those of the registry, and offered to nobody."""

from __future__ import annotations

from functools import partial

from localmoe.prefetch.policies.single_prefetch import SinglePrefetchPolicy, SingleSoonerPolicy
from localmoe.prefetch.policies.sp_moe import SpMoePolicy
from localmoe.prefetch.policy import PolicyFactory


def find_variant(name: str) -> PolicyFactory | None:
    """single-sooner, single-later, or sp-moe@N (which prefetches for the first N layers, whatever was
    measured); None for any other name."""
    for policy in (SinglePrefetchPolicy, SingleSoonerPolicy):
        if name == policy.name:
            return policy
    base, at, cutoff = name.partition("@")
    if base == SpMoePolicy.name and at and cutoff.isdecimal() and cutoff.isascii():
        return partial(SpMoePolicy, fixed_cutoff=int(cutoff))
    return None
