"""What physics allows: predicted upper bounds on tokens a second, from the bytes that must move and measured
rates. Predictions only; nothing here has run.

Notation: E experts a layer, k chosen a token, L layers, g drafted tokens a step, a = probability that a
drafted token is accepted, h = share of demanded experts that are on the device when demanded.

Assumptions:
- Routing is uniform and independent, so t tokens demand U(t) = E (1 - (1 - k/E)^t) distinct experts a layer.
  Real neighbouring tokens share more experts than that, so a real engine can beat these bounds by as much.
- h is the resident share of experts unless a measured hit rate is given.
- A step emits A(g) = 1 + a + ... + a^g tokens on average: acceptances are independent.
- Shared weights are read once a pass, less an input embedding that nothing else uses, of which one row
  is read. Reading the KV cache, arithmetic, kernel launches and the host cost nothing.
- Overlapped copies hide behind all other work of the step; copies on demand hide behind nothing. Where a
  draft foretells no experts (an MTP layer), all are on demand.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.hardware.facts import Hardware

MAX_PREDICTED_DRAFT = 16
_ACCEPTANCE = 0.9  # of a GPTQ draft, where nothing was measured
_LAYER_ACCEPTANCE = 0.85  # of an MTP layer's first token, the least that DeepSeek-V3's report has (5.4.3)
Resource = Literal["link", "device memory"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second that device memory can be read with, and that the host-to-device link moves."""

    device_bytes_per_s: float
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Limit:
    """One predicted bound. Bytes are a token's share; `bound_by` is the resource that takes longer."""

    draft_length: int
    tokens_per_s: float
    device_bytes_per_token: float
    link_bytes_per_token: float
    bound_by: Resource


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds for one plan, all predicted.

    Attributes:
        on_demand: plain decoding, each missing expert fetched when it is asked for.
        overlapped: plain decoding with copies hidden as far as possible, as if the routing were known ahead
            (which takes a lookahead that plain decoding does not have).
        speculative: the best draft length up to MAX_PREDICTED_DRAFT; None when the plan has no draft.
        hit_rate: h, as given or assumed.
        acceptance: a, as given.
    """

    on_demand: Limit
    overlapped: Limit
    speculative: Limit | None
    hit_rate: float
    acceptance: float
    predicted: bool = True

    def as_dict(self) -> dict[str, object]:
        """Plain values for --json."""
        return asdict(self)


def measured_rates(
    hardware: Hardware,
    *,
    device: Literal["cpu", "cuda"],
    emulated_link_bytes_per_s: float | None = None,
    gpu_index: int = 0,
) -> Rates | None:
    """The rates to predict with; None if they were not measured. On CPU both are those of RAM: reading goes
    at up to twice the speed of copying, which reads and writes."""
    if device == "cuda":
        gpu = next((gpu for gpu in hardware.gpus if gpu.index == gpu_index), None)
        if gpu is None or gpu.device_bytes_per_s is None or gpu.h2d_bytes_per_s is None:
            return None
        return Rates(gpu.device_bytes_per_s, gpu.h2d_bytes_per_s)
    copy = hardware.memory_copy_bytes_per_s
    if copy is None:
        return None
    return Rates(2 * copy, min(copy, emulated_link_bytes_per_s or copy))


def distinct_experts(num_experts: int, experts_per_token: int, tokens: int) -> float:
    """U(tokens): expected distinct experts of a layer under uniform routing."""
    return num_experts * (1.0 - (1.0 - experts_per_token / num_experts) ** tokens)


def tokens_per_step(acceptance: float, draft_length: int) -> float:
    """A(draft_length): expected tokens of a step, the target's own included."""
    return sum(acceptance**accepted for accepted in range(draft_length + 1))


def assumed_acceptance(footprint: ModelFootprint) -> float:
    """Of what drafts for this model, where nothing was measured."""
    return _ACCEPTANCE if _foretells(footprint) else _LAYER_ACCEPTANCE


def _foretells(footprint: ModelFootprint) -> bool:
    """Whether its draft may say which experts are needed next."""
    return footprint.draft_model_foretells or not footprint.draft_model_bytes


def predict_limits(
    footprint: ModelFootprint,
    plan: MemoryPlan,
    rates: Rates,
    *,
    compute_bytes: int,
    acceptance: float,
    hit_rate: float | None = None,
) -> Limits:
    """Bounds on decoding speed under a plan."""
    assert 0.0 <= acceptance <= 1.0, acceptance
    hits = plan.resident_share if hit_rate is None else hit_rate
    step = _StepModel(footprint, plan, rates, compute_bytes, acceptance, hits)
    lengths = range(1, MAX_PREDICTED_DRAFT + 1) if plan.drafting else ()
    drafted = [step.limit(length, overlap=_foretells(footprint)) for length in lengths]
    return Limits(
        on_demand=step.limit(0, overlap=False),
        overlapped=step.limit(0),
        speculative=max(drafted, key=lambda limit: limit.tokens_per_s, default=None),
        hit_rate=hits,
        acceptance=acceptance,
    )


@dataclass(frozen=True, slots=True)
class _StepModel:
    footprint: ModelFootprint
    plan: MemoryPlan
    rates: Rates
    compute_bytes: int
    acceptance: float
    hit_rate: float

    def limit(self, draft_length: int, *, overlap: bool = True) -> Limit:
        """The bound with this many drafted tokens a step."""
        model = self.footprint
        shared = self.plan.shared_bytes
        if not self.plan.host_embedding_bytes:  # of which one row is read
            shared -= model.embedding_params * self.compute_bytes
        demanded = model.num_layers * distinct_experts(
            model.num_experts, model.experts_per_token, draft_length + 1
        )
        draft_experts = model.num_layers * model.experts_per_token * model.draft_expert_bytes
        drafted = shared + draft_experts
        if model.draft_model_bytes:  # at least: of a layer's experts a token reads a few
            drafted = model.draft_model_bytes * model.experts_per_token // model.num_experts
        device_bytes = draft_length * drafted + shared + demanded * self.plan.slot_bytes
        link_bytes = demanded * (1.0 - self.hit_rate) * model.expert_bytes
        device_s = device_bytes / self.rates.device_bytes_per_s
        link_s = link_bytes / self.rates.link_bytes_per_s
        tokens = tokens_per_step(self.acceptance, draft_length)
        return Limit(
            draft_length=draft_length,
            tokens_per_s=tokens / (max(device_s, link_s) if overlap else device_s + link_s),
            device_bytes_per_token=device_bytes / tokens,
            link_bytes_per_token=link_bytes / tokens,
            bound_by="link" if link_s > device_s else "device memory",
        )
