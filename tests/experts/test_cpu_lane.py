"""The CPU lane against float64, and what becomes of its threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_weights import exact_int4, exact_nvfp4, fill_int4
from torch import Tensor

from localmoe.core.errors import HardwareError
from localmoe.core.types import ExpertKey
from localmoe.experts import cpu_lane
from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.host_store import HostStore
from localmoe.experts.records import RecordLayout
from localmoe.kernels.activations import Activation
from localmoe.kernels.cpu import control, worker
from localmoe.kernels.mailbox import JOB_SHIFT, LAYER_SHIFT, NOBODY
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.float8 import values

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 4, 3, 12
KINDS = [
    Activation("silu"),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu", limit=0.7),
    Activation("swiglu_oai", limit=1.5, interleaved=True),
    Activation("relu", gated=False),
]
# of each kind code is compiled for many seconds: a plain run looks at the first alone
WORDS = "dtype, transposed", [*itertools.product([torch.bfloat16, torch.float16], [False, True])]


class Rig:
    """A lane over random experts, and the same sums in float64."""

    def __init__(
        self, hidden: int, inner: int, *, transposed: bool = False, activation: Activation = KINDS[0],
        biased: bool = False, dtype: torch.dtype = torch.bfloat16, threads: int = 3,
        form: WeightForm = WeightForm.PLAIN, compute: torch.dtype | None = None,
        caller_works: bool | None = None, tokens: int = TOKENS,
    ) -> None:  # fmt: skip
        """compute: of activations and biases, the weights' own if None. caller_works: as engines have it if
        None, where passes that compute in float32 work along."""
        if caller_works is None:
            caller_works = compute == torch.float32
        height = 2 * inner if activation.gated else inner
        shapes = (height, hidden), (hidden, inner)
        gate_up, down = (shape[::-1] if transposed else shape for shape in shapes)
        self.activation, self.inner = activation, inner
        layout = RecordLayout(gate_up, down, transposed, form)
        self.store = HostStore([layout] * LAYERS, EXPERTS, dtype)
        generator = torch.Generator().manual_seed(hidden * inner)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                self._fill(ExpertKey(layer, expert), form, generator)
        sizes = (height, hidden)
        self.biases = [
            tuple(
                torch.randn(EXPERTS, size, generator=generator).to(compute or dtype) if biased else None
                for size in sizes
            )
            for _ in range(LAYERS)
        ]
        self.x = torch.randn(tokens, hidden, generator=generator).to(compute or dtype)
        self.lane = CpuLane(
            self.store, activation, self.biases,  # type: ignore[arg-type]
            tokens=tokens, top_k=TOP_K, threads=threads, pinned=False,
            dtype=compute, caller_works=caller_works,
        )  # fmt: skip

    def _fill(self, key: ExpertKey, form: WeightForm, generator: torch.Generator) -> None:
        record, scale = self.store.record(key), self.store.layouts[0].hidden ** -0.5
        if form is WeightForm.PLAIN:
            record.copy_(torch.randn(record.shape, generator=generator) * scale)
        elif form is WeightForm.MXFP4:
            for matrix in self.store.mxfp4_views(key):
                for memory, low, high in ((matrix.codes, 0, 256), (matrix.scales, 120, 125)):
                    memory.copy_(torch.randint(low, high, memory.shape, generator=generator))
        elif form is WeightForm.FP8:
            for eight in self.store.fp8_views(key):
                numbers = torch.randn(eight.rows, eight.columns, generator=generator) * 100
                scales = torch.rand(len(numbers), eight.scales.shape[1], generator=generator) * scale / 50
                eight.put(0, numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales)
        elif form in (WeightForm.INT4, WeightForm.INT4_32):
            for integers in self.store.int4_views(key):
                fill_int4(integers, generator, scale / 6)
        elif form is WeightForm.NVFP4:
            for four in self.store.nvfp4_views(key):
                codes = torch.randint(0, 256, (four.rows, four.columns // 2), generator=generator)
                scales = torch.rand(four.rows, four.columns // 16, generator=generator) * 100
                four.put(0, codes.byte(), scales.to(torch.float8_e4m3fn).view(torch.uint8), scale / 200)
        else:
            for packed in self.store.bf12_views(key):
                weights = torch.randn(packed.rows, packed.columns, generator=generator) * scale
                packed.put(0, weights.bfloat16())

    def _weights(self, key: ExpertKey, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        layout = self.store.layouts[0]
        if layout.nvfp4:
            halves = [exact_nvfp4(matrix).to(dtype) for matrix in self.store.nvfp4_views(key)]
            return torch.cat(halves[:-1]), halves[-1]
        if layout.span:
            exact = [exact_int4(integers).to(dtype) for integers in self.store.int4_views(key)]
            return torch.cat(exact[:-1]), exact[-1]
        if not layout.fp8:
            gate_up, down = self.store.weights(key)
            return gate_up.to(dtype), down.to(dtype)
        parts = [  # as the lane has them, which does not round them
            values()[codes.long()].to(dtype) * scales.to(dtype).repeat_interleave(128, 1)[:, : codes.shape[1]]
            for codes, scales in (matrix.take() for matrix in self.store.fp8_views(key))
        ]
        return torch.cat(parts[:-1]), parts[-1]

    def wanted(
        self, layer: int, expert: int, token: int, share: int, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """One pair's row, in float64 or another dtype; gate * up is rounded between the products."""
        gate_up, down = self._weights(ExpertKey(layer, expert), dtype)
        if self.store.layouts[layer].transposed:
            gate_up, down = gate_up.T, down.T
        first, second = self.biases[layer]
        both = gate_up @ self.x[token].to(dtype)
        if first is not None:
            both = both + first[expert].to(dtype)
        gate, up = self.activation.split(both)
        product = self.activation.apply(gate, up).to(self.x.dtype).to(dtype)[:share]
        out: Tensor = down[:, :share] @ product
        return out if second is None or share < self.inner else out + second[expert].to(dtype)


@contextmanager
def rig(hidden: int = 48, inner: int = 40, **options: object) -> Iterator[Rig]:
    made = Rig(hidden, inner, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.lane.close()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(*WORDS)
@settings(max_examples=4)
@given(
    st.sampled_from([17, 48, 130]), st.sampled_from([9, 40, 72]), st.sampled_from(KINDS), st.booleans(),
    st.integers(1, 4), st.data(),
)  # fmt: skip
def test_every_job_equals_float64(
    dtype: torch.dtype, transposed: bool, hidden: int, inner: int, activation: Activation, biased: bool,
    threads: int, data: st.DataObject,
) -> None:  # fmt: skip
    with rig(
        hidden, inner, transposed=transposed, activation=activation, biased=biased, dtype=dtype,
        threads=threads,
    ) as made:  # fmt: skip
        # float32 sums; where gate * up is near a tie it rounds to the neighbour
        check_jobs(made, data, 1, 2e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "together"])
@pytest.mark.parametrize(*WORDS)
@settings(max_examples=4)
@given(
    st.sampled_from([17, 48, 130]), st.sampled_from([9, 40, 72]), st.sampled_from(KINDS), st.booleans(),
    st.integers(1, 4), st.data(),
)  # fmt: skip
def test_float32_activations_are_rounded_nowhere(
    alone: bool, dtype: torch.dtype, transposed: bool, hidden: int, inner: int, activation: Activation,
    biased: bool, threads: int, data: st.DataObject,
) -> None:  # fmt: skip
    """By the caller alone, or with other threads, who may come late."""
    with pytest.MonkeyPatch.context() as patch, rig(
        hidden, inner, transposed=transposed, activation=activation, biased=biased, dtype=dtype,
        threads=threads, compute=torch.float32,
    ) as made:  # fmt: skip
        patch.setattr(cpu_lane, "_ALONE_BYTES", 1 << 40 if alone else 0)
        check_jobs(made, data, 1, 3e-6)


def check_jobs(made: Rig, data: st.DataObject, quantum: int, tolerance: float) -> None:
    """Three random jobs against float64; shares are multiples of `quantum`. Where large terms cancel, float32
    sums are further off than the tolerance, in whatever order: then no further than twice PyTorch's own."""
    for _ in range(3):
        layer = data.draw(st.integers(0, LAYERS - 1))
        free = data.draw(st.permutations(range(TOKENS * TOP_K)))
        jobs = []
        for expert in data.draw(st.lists(st.integers(0, EXPERTS - 1), unique=True, min_size=1)):
            count = data.draw(st.integers(1, 8))
            share = quantum * data.draw(st.integers(1, made.inner // quantum))
            jobs.append((expert, sorted(free[:count]), share))
            free = free[count:]
        out = made.lane.compute(layer, made.x, jobs).double()
        for expert, pairs, share in jobs:
            for pair in pairs:
                wanted = made.wanted(layer, expert, pair // TOP_K, share)
                bound, off = tolerance * wanted.norm() + 1e-4, (out[pair] - wanted).norm()
                if off > bound:
                    near = made.wanted(layer, expert, pair // TOP_K, share, torch.float32)
                    assert off <= 2 * (near.double() - wanted).norm(), (off, bound)


def check_columns(made: Rig, wanted: Tensor) -> None:
    """Of an expert, number 1 of the first layer, whose gate * up is x, and whose down is `wanted`: one column
    of x at a time gives a column of down."""
    size = len(wanted)
    for first in range(0, size, TOKENS):
        count = min(TOKENS, size - first)
        made.x = torch.zeros(TOKENS, size, dtype=made.x.dtype)
        made.x[torch.arange(count), first + torch.arange(count)] = 1
        out = made.lane.compute(0, made.x, [(1, [TOP_K * token for token in range(count)], size)])
        for token in range(count):
            assert torch.equal(out[TOP_K * token] + 0.0, wanted[:, first + token] + 0.0)  # -0 is 0


def check_ahead_bytes(made: Rig, size: Callable[[int], int]) -> None:
    """What a lane of two threads counts of experts (192, 128). size: bytes of so many weights."""
    lane = made.lane
    lane.compute(1, made.x, [(0, [0], 128), (2, [1], 64)])
    assert lane.counters().num_bytes == size(3 * 192 * (128 + 64))
    assert lane.counters().ahead_bytes == 0
    lane.hold()
    word = told(1, 1, 2)
    lane.mailbox.foretold[0] = word
    deadline = time.perf_counter() + 20
    while lane._control[control.FETCHED] != word:
        assert time.perf_counter() < deadline
        time.sleep(1e-4)
    lane.compute(1, made.x, [(2, [0], 64)])
    assert 0 < lane.counters().ahead_bytes <= size(2 * 192 * 64)


def test_an_exact_sum_is_exact() -> None:
    with rig(64, 16, activation=Activation("relu")) as made:
        for expert in range(EXPERTS):
            gate_up, down = made.store.views(ExpertKey(1, expert))
            gate_up.copy_(torch.randint(-2, 3, gate_up.shape))
            down.copy_(torch.randint(-2, 3, down.shape))
        made.x = torch.randint(0, 2, made.x.shape).bfloat16()
        out = made.lane.compute(1, made.x, [(e, [e, 10 + e, 20 + e], 16) for e in range(EXPERTS)])
        for expert in range(EXPERTS):
            for pair in (expert, 10 + expert, 20 + expert):
                assert torch.equal(out[pair].double(), made.wanted(1, expert, pair // TOP_K, 16))


@pytest.mark.parametrize(
    ("hidden", "inner", "share", "options"),
    [
        (130, 72, 71, {}),
        pytest.param(130, 72, 71, {"transposed": True}, marks=pytest.mark.slow),
        pytest.param(192, 128, 64, {"form": WeightForm.MXFP4}, marks=pytest.mark.slow),
        (192, 128, 64, {"form": WeightForm.BF12}),
        (192, 128, 64, {"form": WeightForm.FP8}),
        pytest.param(192, 128, 64, {"form": WeightForm.NVFP4}, marks=pytest.mark.slow),
        pytest.param(192, 128, 64, {"form": WeightForm.INT4}, marks=pytest.mark.slow),
        pytest.param(192, 128, 64, {"form": WeightForm.INT4_32}, marks=pytest.mark.slow),
        (130, 72, 71, {"activation": KINDS[-1]}),
    ],
    ids=["rows", "columns", "mxfp4", "bf12", "fp8", "nvfp4", "int4", "int4-32", "ungated"],
)
def test_a_tokens_sums_do_not_depend_on_the_tokens_beside_it(
    hidden: int, inner: int, share: int, options: dict[str, object]
) -> None:
    with rig(hidden, inner, **options) as made:
        pairs = [TOP_K * token for token in range(TOKENS)]
        alone = [made.lane.compute(0, made.x, [(2, [pair], share)])[pair].clone() for pair in pairs]
        for count in range(2, TOKENS + 1):
            together = made.lane.compute(0, made.x, [(2, pairs[:count], share)])
            assert all(torch.equal(together[pair], alone[i]) for i, pair in enumerate(pairs[:count]))


@settings(max_examples=25)
@given(
    st.integers(1, 90), st.integers(1, 150), st.integers(1, 3 * TOKENS), st.booleans(), st.integers(0, 9),
    st.sampled_from([0, 1 << 40]), st.sampled_from([torch.bfloat16, torch.float32]),
)  # fmt: skip
def test_a_dense_product_is_that_of_float64_and_of_each_row_alone(
    dense_lane: CpuLane, out: int, columns: int, tokens: int, biased: bool, seed: int, alone_bytes: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, columns, generator=generator).to(dtype)
    bias = torch.randn(out, generator=generator) if biased else None
    x = torch.randn(tokens, columns, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_lane, "_ALONE_BYTES", alone_bytes)
        found = dense_lane.dense(x, weight, bias)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        terms = x.double().abs() @ weight.double().abs().T
        assert ((found - exact).abs() <= 1e-6 * (terms + 1)).all()
        rows = [dense_lane.dense(row[None], weight, bias) for row in x]
        assert torch.equal(found, torch.cat(rows))
        strided = torch.empty(columns, tokens).T.copy_(x)
        assert torch.equal(dense_lane.dense(strided, weight, bias), found)
        padded = dense_lane.dense(x, weight, bias, rows=tokens + 3)
        assert torch.equal(padded[:tokens], found) and padded.shape[0] == tokens + 3
        assert not padded[tokens:].any()


@pytest.fixture(scope="module")
def dense_lane() -> Iterator[CpuLane]:
    """One for all products: making it takes longer than they do."""
    with rig(compute=torch.float32, caller_works=True) as made:
        yield made.lane


def test_a_caller_that_works_along_needs_no_other_thread() -> None:
    with rig(threads=1, compute=torch.float32, caller_works=True) as made:
        assert not made.lane._threads
        made.lane.compute(0, made.x, [(0, [0, 4], made.inner)])
        assert made.lane.counters().jobs == 1 and made.lane.counters().busy_s > 0


def test_no_thread_is_at_a_jobs_memory_when_its_caller_goes_on() -> None:
    with rig(threads=2, compute=torch.float32, caller_works=True) as made:
        late = threading.Thread(target=time.sleep, args=(0.3,))  # one that is held up in its block
        late.start()
        made.lane._threads.append(late)
        made.lane._control[control.STOP] = 1
        with pytest.raises(HardwareError):
            made.lane.dense(torch.randn(2, 48), torch.randn(9, 48), None)
        assert not any(thread.is_alive() for thread in made.lane._threads)


def test_a_job_is_over_when_the_interrupt_of_its_caller_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl+C between making a job known to other threads and working along."""
    with rig(threads=2, compute=torch.float32, caller_works=True) as made:
        x, weight, box = torch.randn(TOKENS, 2048), torch.randn(2048, 2048).bfloat16(), made.lane.mailbox
        run, interrupts = cpu_lane.worker.run, [KeyboardInterrupt()]

        def interrupted(me: int, *arguments: object) -> int:
            if interrupts and me == made.lane.num_threads - 1:
                raise interrupts.pop()
            return run(me, *arguments)

        made.lane.dense(x, weight, None)
        monkeypatch.setattr(cpu_lane.worker, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.lane.dense(x, weight, None)
        assert box.answered[0] == box.posted[0], "other threads are at it"
        exact = x.double() @ weight.double().T
        assert (made.lane.dense(x, weight, None) - exact).norm() < 1e-5 * exact.norm()


def test_jobs_with_and_without_other_threads_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_lane, "PARK_S", 0.01)
    chance = np.random.default_rng(3)
    with rig(threads=4, compute=torch.float32, caller_works=True) as made:
        weight = torch.randn(70, 48).bfloat16()
        exact = made.x.double() @ weight.double().T
        for _ in range(200):
            monkeypatch.setattr(cpu_lane, "_ALONE_BYTES", int(chance.choice([0, 1 << 40])))
            expert, pair = int(chance.integers(EXPERTS)), int(chance.integers(TOKENS * TOP_K))
            out = made.lane.compute(1, made.x, [(expert, [pair], made.inner)])
            wanted = made.wanted(1, expert, pair // TOP_K, made.inner)
            assert (out[pair] - wanted).norm() <= 1e-5 * wanted.norm()
            assert (made.lane.dense(made.x, weight, None) - exact).abs().max() < 1e-4
            time.sleep(float(chance.choice([0, 0, 0, 0.02])))


def test_jobs_in_quick_succession_and_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_lane, "PARK_S", 0.02)
    with rig(threads=6) as made:  # more than there are cores
        for job in range(300):
            expert, pair = job % EXPERTS, job % 7
            out = made.lane.compute(0, made.x, [(expert, [pair], made.inner)])
            assert torch.allclose(
                out[pair].double(), made.wanted(0, expert, pair // TOP_K, made.inner), atol=0.05
            )
            if job % 100 == 99:
                deadline = time.perf_counter() + 20
                while made.lane._parked < 6:  # nobody spins for nothing
                    assert time.perf_counter() < deadline
                    time.sleep(0.005)
                began = time.perf_counter()
                made.lane.wake(0.02)  # nobody wakes up who was not told to
                assert made.lane._parked == 6 and time.perf_counter() - began >= 0.02
                made.lane.hold()
                made.lane.wake(20)
                assert made.lane._parked == 0
                made.lane.rest()
        counters = made.lane.counters()
        assert counters.jobs == 300 and counters.num_bytes == 300 * 6 * 48 * 40
        assert 0 < counters.busy_s < 60 and made.lane.healthy


def told(job: int, layer: int, expert: int) -> int:
    return job << JOB_SHIFT | layer << LAYER_SHIFT | expert


@pytest.mark.parametrize(
    ("form", "interleaved"),
    [
        ("rows", False),
        ("bf12", False),
        ("fp8", False),
        *(
            pytest.param(form, order, marks=pytest.mark.slow)
            for form, order in [("rows", True), *itertools.product(["mxfp4", "columns"], [False, True])]
        ),
    ],
)
def test_what_is_foretold_changes_no_bit(form: str, interleaved: bool) -> None:
    """Right, wrong, late and senseless words, before jobs and in the middle of them."""
    generator = np.random.default_rng(0)
    activation, transposed = KINDS[4] if interleaved else KINDS[0], form == "columns"
    in_codes = form in ("mxfp4", "bf12", "fp8")
    hidden, *shares = (192, 128, 64) if in_codes else (130, 72, 31)
    made_of = WeightForm(form) if in_codes else WeightForm.PLAIN
    with rig(
        hidden, shares[0], transposed=transposed, form=made_of, activation=activation, threads=5
    ) as made:
        lane, box = made.lane, made.lane.mailbox
        jobs = [(layer, expert, share) for layer in range(LAYERS) for expert in range(EXPERTS)
                for share in shares]  # fmt: skip
        alone = {job: lane.compute(job[0], made.x, [(job[1], [4], job[2])])[4].clone() for job in jobs}
        for _ in range(300):
            layer, expert, share = jobs[generator.integers(len(jobs))]
            other = int(generator.integers(EXPERTS))
            job = int(box.posted[0]) - int(generator.integers(0, 2))
            box.foretold[0] = [
                told(job, layer, expert), told(job, layer, other), told(job, 1 - layer, expert),
                told(job, LAYERS, 0), told(job, 0, NOBODY), int(generator.integers(1 << 62)),
            ][generator.integers(6)]  # fmt: skip
            time.sleep(generator.choice([0.0, 1e-4]))
            out = lane.compute(layer, made.x, [(expert, [4], share)])
            assert torch.equal(out[4], alone[layer, expert, share])
        done = lane.counters()
        assert done.ahead_bytes == 0 if transposed else 0 < done.ahead_bytes < done.num_bytes


def test_bytes_that_were_fetched_ahead_are_those_of_the_foretold_expert() -> None:
    with rig(130, 72, threads=2) as made:
        lane, box = made.lane, made.lane.mailbox

        def ahead(word: int, experts: list[tuple[int, int]]) -> int:
            """Bytes by which the count grows with a job of (expert, columns) each, in layer 1."""
            before = lane.counters().ahead_bytes
            lane.hold()
            box.foretold[0] = word
            deadline = time.perf_counter() + 20
            while word & NOBODY < EXPERTS and lane._control[control.FETCHED] != word:
                assert time.perf_counter() < deadline
                time.sleep(1e-4)
                box.foretold[0] = NOBODY  # a thread that has only just begun knows the word already
                time.sleep(1e-4)
                box.foretold[0] = word
            entries = [(expert, [i], columns) for i, (expert, columns) in enumerate(experts)]
            lane.compute(1, made.x, entries)
            return lane.counters().ahead_bytes - before

        # a block may be another thread's in the end, which is not counted
        job = int(box.posted[0])
        assert 0 < ahead(told(job, 1, 2), [(0, 72), (2, 35), (3, 72)]) <= 4 * 35 * 130
        assert 0 < ahead(told(job + 1, 1, 0), [(0, 72)]) <= 4 * 72 * 130
        assert ahead(told(job + 2, 1, 3), [(0, 72), (2, 72)]) == 0
        assert ahead(told(job + 3, 0, 2), [(0, 72), (2, 72)]) == 0
        assert ahead(told(job + 4, 1, NOBODY), [(0, 72)]) == 0
        assert ahead(told(job + 5, 1, 1), [(1, 72)]) > 0
        lane.compute(1, made.x, [(1, [0], 72)])
        assert lane.counters().jobs == 7, "nothing was foretold of the last job"


def test_a_closed_lane_leaves_no_thread_and_answers_nobody() -> None:
    with rig() as made:
        before = threading.active_count()
        names = {thread.name for thread in threading.enumerate()}
        assert {"cpu-lane-0", "cpu-lane-1", "cpu-lane-2"} <= names
        made.lane.close()
        assert threading.active_count() == before - 3
        assert int(made.lane.mailbox.answered[0]) == -1 and not made.lane.healthy
        with pytest.raises(HardwareError, match="does not answer"):
            made.lane.compute(0, made.x, [(0, [0], made.inner)])


def test_a_thread_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> int:
        raise ValueError("no such instruction")

    with rig() as made:
        made.lane.close()
    monkeypatch.setattr(CpuLane, "_compile", lambda self: None)
    monkeypatch.setattr(worker, "run", broken)
    with rig() as made:
        deadline = time.perf_counter() + 20
        while made.lane.healthy:
            assert time.perf_counter() < deadline
        assert made.lane.failure == "ValueError: no such instruction"
        assert int(made.lane.mailbox.answered[0]) == -1
        with pytest.raises(HardwareError, match="no such instruction"):
            made.lane.compute(0, made.x, [(0, [0], made.inner)])


def test_memory_of_the_mailbox_does_not_overlap() -> None:
    with rig() as made:
        box = made.lane.mailbox
        parts = [box.posted, box.answered, box.foretold, box.head, box.entries, box.pairs, box.x, box.out]
        ranges = sorted((part.ctypes.data, part.ctypes.data + part.nbytes) for part in parts)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
        assert ranges[0][0] == box.address and ranges[-1][1] <= box.address + box.memory.numel()
        lines = {int(part.ctypes.data) // 128 for part in (box.posted, box.answered, box.foretold, box.head)}
        assert len(lines) == 4 and np.prod(box.out.shape) == TOKENS * TOP_K * 48


class Entry:
    """Stands in for a dispatcher of numba's. overloads: what it has read or compiled."""

    def __init__(self, error: Exception | None, *, read: bool) -> None:
        self.error, self.overloads, self.calls = error, {"made": 1} if read else {}, 0

    def __call__(self, *arguments: object) -> int:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return len(arguments)


def test_compiled_code_that_was_cut_short_on_disk_is_compiled_anew(caplog: pytest.LogCaptureFixture) -> None:
    made = {True: Entry(EOFError("Ran out of input"), read=False), False: Entry(None, read=True)}
    run = worker.CompiledEntry(lambda sources, kept: made[kept])
    assert [run(1, 2, 3), run(1)] == [3, 1]
    assert made[True].calls == 1 and len(caplog.records) == 1
    assert "cannot be kept or read again" in caplog.text


def test_compiled_code_is_not_kept_where_there_is_no_folder_for_it() -> None:
    def make(sources: int, *, kept: bool) -> Entry:
        if kept:
            raise RuntimeError("cannot cache function: no locator available")
        return Entry(None, read=True)

    assert worker.CompiledEntry(make)(1, 2) == 2


def test_what_goes_wrong_while_it_works_is_not_tried_again() -> None:
    entry = Entry(ZeroDivisionError("x"), read=True)
    with pytest.raises(ZeroDivisionError):
        worker.CompiledEntry(lambda sources, kept: entry)(1)
    assert entry.calls == 1
