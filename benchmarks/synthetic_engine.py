"""Change what a loaded engine of random weights simulates, so that one load serves several measurements."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from localmoe.core.routing_trace import RoutingTrace
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.types import ModelFootprint
from localmoe.engine import Engine
from localmoe.model.synthetic import SyntheticModel

POPULAR = "popular"
_PASSAGE, _PASSAGES = 640, 6  # tokens of a text with one subject
_ALPHA, _REPEAT = 1.1, 0.3


def popular_trace(footprint: ModelFootprint) -> RoutingTrace:
    """Routing with favourites, made up: in a passage the r-th most popular expert of a layer is chosen in
    proportion to r^-1.1 (Zipf), and 30 % of a token's experts are kept from the token before."""
    layers, experts, top_k = footprint.num_layers, footprint.num_experts, footprint.experts_per_token
    generator = np.random.default_rng(0)
    rows = np.empty((_PASSAGE * _PASSAGES, layers, top_k), dtype=np.int16)
    for at in range(len(rows)):
        if at % _PASSAGE == 0:
            ranks = generator.random((layers, experts)).argsort(axis=1).argsort(axis=1)
            weight = -_ALPHA * np.log(ranks + 1.0)
        keys = weight + generator.gumbel(size=(layers, experts))  # the top k are a draw without replacement
        if at % _PASSAGE:
            kept = np.where(generator.random((layers, top_k)) < _REPEAT, rows[at - 1], -1)
            layer, place = np.nonzero(kept >= 0)
            keys[layer, kept[layer, place]] = np.inf
        rows[at] = np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k]
    starts = np.arange(0, len(rows), _PASSAGE, dtype=np.int64)
    return RoutingTrace("made up", experts, rows, starts)


def simulate(engine: Engine, routing: str, acceptance: float | None, match: float | None) -> None:
    """From the next answer on. routing: as for `localmoe bench`, or "popular"."""
    footprint = engine.footprint
    if routing == POPULAR:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.npz"
            popular_trace(footprint).write(path)
            _replace(engine, SyntheticSettings(parse_routing(f"trace:{path}"), acceptance, match))
    else:
        _replace(engine, SyntheticSettings(parse_routing(routing), acceptance, match))


def _replace(engine: Engine, settings: SyntheticSettings) -> None:
    footprint = engine.footprint
    engine._loaded.passes.synthetic = SyntheticModel(
        settings, footprint.num_layers, footprint.num_experts, footprint.experts_per_token
    )
