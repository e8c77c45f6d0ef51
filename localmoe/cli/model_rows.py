"""Rows of a table on a model's size, for people. Finds nothing out."""

from __future__ import annotations

from localmoe.core.types import ModelFootprint
from localmoe.core.units import format_count


def size_rows(footprint: ModelFootprint) -> list[tuple[str, object]]:
    """Parameters and experts."""
    total, active = format_count(footprint.total_params), format_count(footprint.active_params)
    layers, experts, top = footprint.num_layers, footprint.num_experts, footprint.experts_per_token
    return [
        ("Parameters", f"{total}, {active} a token"),
        ("Experts", f"{layers} layers x {experts}, top {top}"),
    ]
