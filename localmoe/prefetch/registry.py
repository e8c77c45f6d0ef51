"""Names of the policies, as used by the command line, the page and the benchmarks. To add one: a file and a
line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from localmoe.core.errors import ConfigError
from localmoe.prefetch.policies.adapmoe import AdapMoePolicy
from localmoe.prefetch.policies.moe_infinity import MoeInfinityPolicy
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.next_gate import NextGatePolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policies.sp_moe import SpMoePolicy
from localmoe.prefetch.policy import CacheShape, Policy, PolicyFactory
from localmoe.prefetch.variants import find_variant

POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        OnDemandPolicy.name: OnDemandPolicy,
        NextGatePolicy.name: NextGatePolicy,
        MoeInfinityPolicy.name: MoeInfinityPolicy,
        AdapMoePolicy.name: AdapMoePolicy,
        SpMoePolicy.name: SpMoePolicy,
        MoeSpeqPolicy.name: MoeSpeqPolicy,
    }
)


def check_policy(name: str) -> str:
    """The name itself, if there is such a policy.

    Raises:
        ConfigError: there is none.
    """
    policy_factory(name)
    return name


def policy_factory(name: str) -> PolicyFactory:
    """What makes the policy of that name, or the variant for comparisons.

    Raises:
        ConfigError: there is none.
    """
    found = POLICIES.get(name) or find_variant(name)
    if found is None:
        raise ConfigError(f"There is no policy '{name}': choose one of {', '.join(POLICIES)}.")
    return found


def decides_within_passes(name: str) -> bool:
    """Whether a policy needs to hear of single layers, so that where whole passes run (on a GPU) only its
    cache is left."""
    return bool(getattr(policy_factory(name), "needs_layers", False))


def make_policy(name: str, shape: CacheShape) -> Policy:
    """A fresh policy.

    Raises:
        ConfigError: there is no policy of that name.
    """
    return policy_factory(name)(shape)
