"""The experts of a long prompt, group after group as a stream brings them: the sums of all, by kernels that
were compiled for one kind of launch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from localmoe.experts.prefill_stream import ExpertGroup
from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu.grouping import Groups
from localmoe.kernels.gpu.routed_experts import ExpertShape
from localmoe.model import device_experts
from localmoe.model.device_experts import ALIGNED, DeviceRoutedExperts, pair_bytes

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 32, 48, 7, 2, 9
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Stream:
    """Brings experts in groups of such sizes."""

    def __init__(self, records: Tensor, sizes: list[int], lent: Tensor | None) -> None:
        self._records, self._sizes, self.lent = records, sizes, lent

    def plan(self, layer: int) -> list[ExpertGroup]:
        order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1)).tolist()
        groups = []
        for size in self._sizes:
            experts, order = order[:size], order[size:]
            groups.append(ExpertGroup(experts, [self._records[e].data_ptr() for e in experts], []))
        assert not order
        return groups

    def bring(self, layer: int, groups: list[ExpertGroup]) -> Iterator[ExpertGroup]:
        yield from groups


@pytest.mark.parametrize(("lends", "share"), [(False, 128), (True, 4)])
@pytest.mark.parametrize("sizes", [[7], [3, 1, 2, 1], [1] * 7, [2, 4, 1]])
def test_groups_of_any_size_add_up_and_are_launched_alike(
    sizes: list[int], lends: bool, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What experts compute may lie in memory that is lent, and several programs share an expert's rows; a
    token that chooses an expert twice has it twice."""
    monkeypatch.setattr(device_experts, "STREAM_SHARE", share)
    chance = torch.Generator().manual_seed(0)
    records = torch.randn(EXPERTS, 3 * HIDDEN * INNER, generator=chance).div(6).to(DEVICE, torch.float16)
    memory = SimpleNamespace(
        store=SimpleNamespace(num_experts=EXPERTS),
        block=SimpleNamespace(done=torch.zeros(1, dtype=torch.int64, device=DEVICE)),
    )
    shape = ExpertShape(HIDDEN, INNER, False, Activation("relu"))
    num_bytes = TOKENS * TOP_K * pair_bytes(shape) + ALIGNED
    lent = torch.full((num_bytes,), 255, dtype=torch.uint8, device=DEVICE) if lends else None  # of NaN
    live = torch.tensor([TOKENS], dtype=torch.int32, device=DEVICE)
    state: Any = SimpleNamespace(
        memory=memory, window=SimpleNamespace(start=live, live=live), forced=None, routed={},
        phase="prefill", stream=Stream(records, sizes, lent),
    )  # fmt: skip
    launched: list[Groups] = []
    run_groups = device_experts.run_groups

    def watched(x: Tensor, groups: Groups, *rest: Any) -> None:
        launched.append(groups)
        run_groups(x, groups, *rest)

    monkeypatch.setattr(device_experts, "run_groups", watched)
    layer = DeviceRoutedExperts(0, None, shape, state)
    x = torch.randn(TOKENS, HIDDEN, generator=chance).to(DEVICE, torch.float16)
    index = torch.rand(TOKENS, EXPERTS, generator=chance).argsort(dim=1)[:, :TOP_K].to(DEVICE)
    index[:, 0] = torch.where(torch.arange(TOKENS, device=DEVICE) < 7, 3, index[:, 0])
    index[0] = 3
    weights = torch.rand(TOKENS, TOP_K, generator=chance).to(DEVICE)
    for _ in range(2):  # words are uploaded by turns
        found = layer(x, index, weights)
        wanted = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64, device=DEVICE)
        for token in range(TOKENS):
            for k in range(TOP_K):
                gate_up, down = records[index[token, k]].double().split([2 * INNER * HIDDEN, INNER * HIDDEN])
                gate, up = (gate_up.view(2, INNER, HIDDEN) @ x[token].double()).unbind()
                wanted[token] += weights[token, k] * (down.view(HIDDEN, INNER) @ (gate.relu() * up))
        assert (found - wanted).norm() < 2e-3 * wanted.norm()
    assert lent is None or lent.ne(255).sum() > TOKENS * TOP_K * 4 * HIDDEN / 2, "it was not used"
    assert [len(groups.expert) for groups in launched] == 2 * sizes
    # Triton compiles a kernel for each kind of alignment, and a dry run of one group has to meet them all
    assert all(groups.address.data_ptr() % 16 == 0 for groups in launched)
    assert all(groups.ticket is None and groups.landing is None for groups in launched)
