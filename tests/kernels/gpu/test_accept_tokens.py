"""A window moves on behind its pass on the device as it does by the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from localmoe.kernels.gpu.acceptance import accept_tokens
from localmoe.model.device_window import DeviceWindow

ROWS = 72
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@settings(max_examples=40)
@given(st.integers(0, 2**16), st.integers(0, ROWS), st.data())
def test_the_kernel_keeps_what_the_reference_keeps(seed: int, count: int, data: st.DataObject) -> None:
    drafted = max(0, count - 1)  # no token at all is run to compile
    rows = data.draw(st.integers(drafted + 1, ROWS), label="rows of the pass")
    agreeing = data.draw(st.integers(0, drafted), label="drafted tokens that agree")
    given_count = data.draw(st.none() | st.integers(0, drafted), label="accepted by a simulation")
    start = data.draw(st.integers(0, 2**40), label="start")
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 3, (ROWS,), generator=chance).tolist()
    choices = torch.randint(0, 3, (rows + 1,), generator=chance, dtype=torch.int32)[1:]  # not on 16 bytes
    choices[:agreeing] = torch.tensor(tokens[1 : 1 + agreeing])
    expected, found = DeviceWindow(ROWS, torch.device("cpu")), DeviceWindow(ROWS, DEVICE)
    for window in (expected, found):
        window.set(start, count, tokens)
        window.cursor.fill_(drafted)
    expected.go_on(choices, 2, given_count)
    words = found.start, found.live, found.cursor, found.tokens
    accept_tokens(*words, choices.to(DEVICE), 2, given_count)
    for name in ("start", "live", "cursor", "tokens") if count else ("start", "live", "cursor"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    kept = int(expected.start) - start - 1
    assert kept == given_count if given_count is not None else kept >= agreeing
    assert not count or expected.tokens[0] == choices[kept]
