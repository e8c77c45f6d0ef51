"""The compiled loops against array operations that say the same, and what happens where nothing compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from localmoe.prefetch import loops

ROOT = Path(__file__).parents[2]
seeds = st.integers(0, 2**32 - 1)
sizes = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 4))  # layers, experts, experts a token


def both(loop: Callable[..., Any]) -> list[Callable[..., Any]]:
    """As compiled, and as it runs where nothing compiles."""
    return [loop, loop.py_func]  # type: ignore[attr-defined]


def masks(draw: np.random.Generator, *shape: int, share: float = 0.5) -> NDArray[np.bool_]:
    return draw.random(shape) < share


@given(seeds, sizes, st.integers(1, 5))
def test_tokens_are_entered_one_after_the_other(seed: int, size: tuple[int, int, int], tokens: int) -> None:
    draw, (num_layers, num_experts, top_k) = np.random.default_rng(seed), size
    chosen = draw.integers(-1, num_experts + 1, (tokens, num_layers, top_k), dtype=np.int32)
    weights = draw.integers(1, 65, (tokens, num_layers, top_k)).astype(np.float32) / 64  # sums are exact
    for loop in both(loops.note_token):
        wanted, sure = (
            np.zeros((num_layers, num_experts), np.int32),
            np.zeros((num_layers, num_experts), bool),
        )
        routed = np.zeros((tokens, num_layers, num_experts), bool)
        for token in range(tokens):
            loop(token, chosen[token], weights[token], wanted, sure, routed)
        for layer in range(num_layers):
            for expert in range(num_experts):
                uses = np.argwhere(chosen[:, layer] == expert)
                assert wanted[layer, expert] == len(uses)
                assert routed[:, layer, expert].nonzero()[0].tolist() == sorted({int(t) for t, _ in uses})
                shares = [
                    2 * top_k * weights[t, layer, k] >= np.cumsum(weights[t, layer])[-1] for t, k in uses
                ]
                first = any(t == 0 for t, _ in uses)
                assert sure[layer, expert] == (first or len(uses) > 1 or any(shares))


@given(seeds, sizes, st.integers(0, 20))
def test_the_sure_are_picked_by_need_of_their_layers(
    seed: int, size: tuple[int, int, int], room: int
) -> None:
    draw, (num_layers, num_experts, _) = np.random.default_rng(seed), size
    sure, here, asked = (masks(draw, num_layers, num_experts) for _ in range(3))
    quota = draw.integers(0, 2 * num_experts, num_layers) / 2
    layers, experts = (sure & ~here & ~asked).nonzero()
    rank = np.arange(len(layers)) - np.searchsorted(layers, layers)
    order = np.argsort((here.sum(axis=1) - quota)[layers] + rank, kind="stable")
    taken = order[:room] if len(layers) > room else np.arange(len(layers))
    expected = (layers * num_experts + experts)[taken]
    for loop in both(loops.pick_sure):
        requested = asked.copy()
        assert loop(sure, here, requested, quota, room).tolist() == expected.tolist()
        after = asked.copy()
        after.reshape(-1)[expected] = True
        assert (requested == after).all()


@given(seeds, sizes, st.sampled_from([-1.0, 0.0, 0.3, 0.5, 1.0, 2.5, 1e6]))
def test_what_is_in_time_is_complete_before_its_layer_begins(
    seed: int, size: tuple[int, int, int], copies_per_layer: float
) -> None:
    draw, (num_layers, num_experts, _) = np.random.default_rng(seed), size
    wanted = draw.integers(0, 3, (num_layers, num_experts), dtype=np.int32)
    here, asked = (
        masks(draw, num_layers, num_experts, share=0.3),
        masks(draw, num_layers, num_experts, share=0.2),
    )
    expected: list[int] = []
    for layer, expert in np.argwhere((wanted > 0) & ~here & ~asked).tolist():
        if copies_per_layer < 0 or len(expected) + 1 <= layer * copies_per_layer:
            expected.append(layer * num_experts + expert)
    for loop in both(loops.pick_in_time):
        requested = asked.copy()
        assert loop(wanted, here, requested, copies_per_layer).tolist() == expected
        assert (
            requested.reshape(-1).nonzero()[0] == sorted({*asked.reshape(-1).nonzero()[0], *expected})
        ).all()


@given(seeds, sizes)
def test_worth_is_reuse_and_what_the_window_wants_stays(seed: int, size: tuple[int, int, int]) -> None:
    draw, (num_layers, num_experts, _) = np.random.default_rng(seed), size
    reuse, quota = draw.random((num_layers, num_experts)), draw.integers(0, num_experts, num_layers) / 1.5
    here, demanded = masks(draw, num_layers, num_experts), masks(draw, num_layers, num_experts, share=0.3)
    wanted = draw.integers(0, 2, (num_layers, num_experts), dtype=np.int32)
    expected = reuse - 1e3 * (here.sum(axis=1) > quota)[:, None] + demanded
    expected[wanted > 0] = np.inf
    for loop in both(loops.worth_now):
        worth = np.zeros(reuse.shape, np.float32)
        loop(reuse, here, quota, demanded, wanted, 1e3, worth)
        assert (worth == expected.astype(np.float32)).all()


@given(seeds, sizes, st.integers(0, 5))
def test_uses_count_for_the_tokens_that_foresaw_them(
    seed: int, size: tuple[int, int, int], tokens: int
) -> None:
    draw, (num_layers, num_experts, _) = np.random.default_rng(seed), size
    demanded, routed = masks(draw, num_layers, num_experts), masks(draw, tokens, num_layers, num_experts)
    counts = draw.random((tokens + 1, 2))
    used = (routed & demanded).astype(float)
    late = (demanded & ~routed.any(axis=0)).astype(float)
    expected = np.tensordot(counts[:tokens].T, used, 1) + counts[tokens][:, None, None] * late
    for loop in both(loops.add_uses):
        recent, frequency = np.ones((num_layers, num_experts)), np.ones((num_layers, num_experts))
        loop(demanded, routed, counts, recent, frequency)
        assert np.stack([recent, frequency]) == pytest.approx(expected + 1, rel=1e-12)


def test_without_numba_a_loop_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert loops.compiled("int64", "int64")(abs) is abs
    assert "uncompiled" in caplog.text


@pytest.mark.parametrize(
    "error", [RuntimeError("cannot cache function"), OSError(28, "disk full"), EOFError("half a file")]
)
def test_where_nothing_can_be_kept_or_read_again_it_is_compiled_all_the_same(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    njit = numba.njit

    def cannot_keep(*arguments: Any, cache: bool = False) -> Any:
        if cache:
            raise error
        return njit(*arguments)

    monkeypatch.setattr(numba, "njit", cannot_keep)

    def double(number: int) -> int:
        return 2 * number

    made = loops.compiled("int64", "int64")(double)
    assert made is not double and made(21) == 42


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_a_file_that_was_cut_short_does_not_keep_policies_from_being_made(
    ending: str, tmp_path: Path
) -> None:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    make = (
        "from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy as P; from localmoe.prefetch.policy "
    )
    make += "import CacheShape as C; print(P(C(2, 4, 1, 3))._worth().shape)"
    for kept in ("whole", "cut"):
        done = subprocess.run(
            [sys.executable, "-c", make], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100
        )
        assert done.stdout == "(2, 4)\n", done.stderr
        assert ("cannot be kept or read" in done.stderr) == (kept == "cut")
        for file in tmp_path.rglob(f"*note_token*.{ending}"):
            os.truncate(file, file.stat().st_size // 2)
