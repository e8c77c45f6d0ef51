"""The panel's card of the expert cache: how demands were met, what prefetching did, and the best that any
cache of this size could have kept. Computes nothing but shares."""

from __future__ import annotations

from app import words
from app.cards import bar, card, fact, legend
from app.texts import ENGLISH, Texts
from localmoe.core.live_state import ReuseBound
from localmoe.core.stats import GenerationStats

_KINDS = {
    "hit": ("already in a slot", "experts that were in device memory when the model asked for them"),
    "late": ("copy in flight", "experts whose copy had begun but was not complete when the model asked"),
    "miss": ("fetched on demand", "experts whose copy began only when the model asked for them"),
    "cpu": ("computed on the CPU", "experts that the CPU computed from RAM while the GPU went on"),
}


_KINDS_OF_DISK = {
    **_KINDS,
    "hit": ("already in RAM", "experts that were in RAM when the model asked for them"),
    "late": ("being read", "experts whose reading had begun but was not complete when the model asked"),
    "miss": (
        "read on demand",
        "experts whose reading from the disk began only when the model asked for them",
    ),
}


def cache_card(
    stats: GenerationStats | None, bound: ReuseBound | None, t: Texts = ENGLISH, *, from_disk: bool = False
) -> str:
    """bound: of the same answer, once it has ended. from_disk: experts are computed in RAM and read into it
    from the disk."""
    kinds = _KINDS_OF_DISK if from_disk else _KINDS
    hit_rate = stats.hit_rate if stats else None
    counts = {"hit": 0, "late": 0, "miss": 0}
    if stats:
        counts = {"hit": stats.hits, "late": stats.late, "miss": stats.misses}
    label = t("hits {hits}, late {late}, misses {misses}", hits=counts["hit"], late=counts["late"],
              misses=counts["miss"])  # fmt: skip
    if stats and stats.cpu_jobs:
        counts["cpu"] = stats.computed
        label += t(", computed on the CPU {count}", count=stats.computed)
    whole = max(1, sum(counts.values()))
    parts = [(name, t(kinds[name][0]), f"{count:,}", t(kinds[name][1])) for name, count in counts.items()]
    shares = bar([(name, count / whole) for name, count in counts.items()], label)
    hint = t("share of the experts that the model asked for that were in device memory at that moment")
    if from_disk:
        hint = t("share of the experts that the model asked for that were in RAM at that moment")
    rate = fact(t("Hit rate"), words.percent(hit_rate), "hit_rate", hint)
    body = rate + shares + legend(parts) + _copies(stats, t, from_disk) + _bound(bound, t)
    return card(t("Expert cache"), body, "cache")


def _copies(stats: GenerationStats | None, t: Texts, from_disk: bool) -> str:
    value = words.NONE
    if stats:
        value = t("{count} ({unused} unused)", count=f"{stats.prefetched:,}", unused=f"{stats.wasted:,}")
    hint = t("experts copied before the model asked for them; unused: evicted without being asked for")
    if from_disk:
        hint = t("experts read before the model asked for them; unused: given up without being asked for")
    return fact(t("Prefetched"), value, "prefetched", hint)


def _bound(bound: ReuseBound | None, t: Texts) -> str:
    if bound is None:
        return ""
    hint = t(
        "share of what the model asked for that needed no copy; beside it the best that any cache of this "
        "size could do that knows the whole answer in advance (Belady's rule). Prefetching makes the hit "
        "rate higher than this, as it copies the same bytes earlier"
    )
    if bound.reached is None:
        value = t("at best {best} (first steps)", best=words.percent(bound.best))
    else:
        reached = words.percent(bound.reached)
        value = t("{reached}, at best {best}", reached=reached, best=words.percent(bound.best))
    return fact(t("Reused without a copy"), value, "reuse", hint)
