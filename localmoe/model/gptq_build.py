"""Builds the GPTQ draft of a loaded model: layer after layer, each calibrated on what the quantised layers
before it give. Chooses no settings and no place (engine.drafting does)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.core.draft_config import GptqSettings
from localmoe.core.errors import DraftError
from localmoe.core.types import ExpertKey, Progress, ProgressCallback
from localmoe.experts.record_store import RecordStore
from localmoe.kernels.activations import inner_function
from localmoe.kernels.codes import CodeMatrix
from localmoe.model.expert_module import expert_biases, weight_names
from localmoe.model.layerwise import LayerwiseModel, decoder_layers
from localmoe.model.skeleton import ExpertsModule, Skeleton
from localmoe.quant.builder import DraftCancelledError
from localmoe.quant.calibrated_layer import CalibratedLayer, LayerTokens, QuantizedExpert, chunk_bytes
from localmoe.quant.draft_writer import DraftWriter, ExpertMatrices

HELD_OUT = 16  # one sequence of so many only judges
BATCH = 4  # sequences that go through a layer at once
_KEPT_SHARE = 0.1  # of the budget, that may lie unused in the allocator between pieces of work
_WORKSPACE_BYTES = 768 << 20  # of a GPU's libraries, and of a batch inside a layer


class StoredLayer:
    """One layer's records as plain matrices (quant.calibrated_layer.LayerWeights)."""

    def __init__(self, experts: ExpertsModule, store: RecordStore, layer: int, device: torch.device) -> None:
        self.num_experts = store.num_experts
        self._module = experts.module
        self._layout = experts.layout
        self._store = store
        self._layer = layer
        self._activate = inner_function(experts.module)
        biases = expert_biases(experts.module)
        self._gate_up_bias, self._down_bias = (None if b is None else b.to(device) for b in biases)

    def gate_up(self, expert: int) -> Tensor:
        """(2I, H), rows in the module's own order; without a gate (I, H)."""
        return self._plain(self._store.matrix(ExpertKey(self._layer, expert), 0))

    @property
    def up_shape(self) -> tuple[int, int]:
        """(I, H)."""
        return self._layout.inner, self._layout.hidden

    def down(self, expert: int) -> Tensor:
        """(H, I)."""
        return self._plain(self._store.matrix(ExpertKey(self._layer, expert), 1))

    def _plain(self, matrix: Tensor) -> Tensor:
        return matrix.T.contiguous() if self._layout.transposed else matrix

    def activate(self, expert: int, product: Tensor) -> Tensor:
        """(n, 2I), without a gate (n, I) -> (n, I)."""
        if self._gate_up_bias is not None:
            product = product + self._gate_up_bias[expert]
        return self._activate(product)

    def finish(self, expert: int, product: Tensor) -> Tensor:
        """(n, H) -> (n, H)."""
        return product if self._down_bias is None else product + self._down_bias[expert]

    def split(self, gate_up: CodeMatrix) -> tuple[CodeMatrix, ...]:
        """gate and up of a quantised gate_up; itself where there is no gate."""
        if not self._layout.gated:
            return (gate_up,)
        half = gate_up.out_features // 2
        concatenated = bool(self._module.is_concatenated)
        rows = (slice(half), slice(half, None)) if concatenated else (slice(0, None, 2), slice(1, None, 2))
        gate, up = (
            CodeMatrix(
                gate_up.codes[part],
                gate_up.scales[part],
                gate_up.in_features,
                gate_up.group_size,
                gate_up.bits,
            )
            for part in rows
        )
        return gate, up

    def join(self, parts: Sequence[CodeMatrix]) -> CodeMatrix:
        """gate_up of what `split` made of it."""
        if len(parts) == 1:
            return parts[0]
        gate, up = parts

        def rows(a: Tensor, b: Tensor) -> Tensor:
            return torch.cat([a, b]) if self._module.is_concatenated else torch.stack([a, b], 1).flatten(0, 1)

        codes, scales = rows(gate.codes, up.codes), rows(gate.scales, up.scales)
        return CodeMatrix(codes, scales, gate.in_features, gate.group_size, gate.bits)


@dataclass(slots=True)
class _Report:
    """Counts experts, estimates what is left, and stops the build when asked to."""

    total: int
    progress: ProgressCallback | None
    cancel: threading.Event | None
    between: Callable[[], None]
    stage: str
    done: int = 0
    quantised: int = 0  # of `done`, by this run
    seconds: float = 0.0  # that they took
    error: float = 0.0  # sums over the layer at hand
    nearest: float = 0.0

    def tick(self) -> None:
        """Between pieces of work."""
        self.between()
        if self.cancel is not None and self.cancel.is_set():
            raise DraftCancelledError(
                f"The draft build was cancelled after {self.done} of {self.total} experts; finished layers "
                "are kept, and the next build of this draft goes on from there."
            )

    def expert(self, expert: QuantizedExpert, seconds: float) -> None:
        """One is done, `seconds` after the one before."""
        self.done += 1
        self.quantised += 1
        self.seconds += seconds
        self.error += sum(expert.errors)
        self.nearest += sum(expert.nearest_errors)
        self._tell()

    def layer(self) -> None:
        """A new layer begins."""
        self.error = self.nearest = 0.0

    def replayed(self, experts: int) -> None:
        """A layer was finished by an earlier run."""
        self.done += experts
        self._tell()

    def _tell(self) -> None:
        if self.progress is None:
            return
        left = self.seconds / self.quantised * (self.total - self.done) if self.quantised else None
        detail = ""
        if self.nearest:
            detail = f"output error {100 * self.error / self.nearest:.0f} % of rounding to nearest"
        self.progress(Progress(self.stage, self.done, self.total, "experts", left, detail))


def least_build_bytes(skeleton: Skeleton, settings: GptqSettings, itemsize: int) -> int:
    """Device memory that a build on a GPU needs with one expert at a time; itemsize: of a stored weight."""
    layout = skeleton.experts[0].layout
    hidden, inner = layout.hidden, layout.inner
    tokens = settings.num_tokens * (hidden * (itemsize + 4) + skeleton.experts_per_token * 12)
    experts = {  # whose biases move with the shared weights
        id(getattr(found.module, name)) for found in skeleton.experts for name in weight_names(found.module)
    }
    layer = 0
    for decoder_layer in decoder_layers(skeleton):
        shared = (w.numel() for w in decoder_layer.parameters() if id(w) not in experts)
        layer = max(layer, sum(shared) * itemsize)
    return tokens + layer + _WORKSPACE_BYTES + chunk_bytes(1, hidden, inner, settings.group_size, itemsize)


class GptqBuild:
    """One build. The skeleton's shared weights are in RAM, and of no other use afterwards."""

    def __init__(
        self,
        skeleton: Skeleton,
        store: RecordStore,
        tokens: Tensor,
        settings: GptqSettings,
        device: torch.device,
        budget_bytes: int,
    ) -> None:
        """tokens: int64 (S, length), S a multiple of BATCH. budget_bytes: of device memory, for
        everything."""
        self._skeleton = skeleton
        self._store = store
        self._tokens = tokens
        self._settings = settings
        self._device = device
        self._budget = budget_bytes

    def run(
        self,
        writer: DraftWriter,
        *,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
        pause: Callable[[], None] | None = None,
    ) -> None:
        """Add all layers to `writer` that it has not.

        Args:
            pause: called between pieces of work; may wait.

        Raises:
            DraftCancelledError: `cancel` was set.
            DraftError: a weight is not finite, the budget is too small, or the draft cannot be written.
        """
        skeleton, store = self._skeleton, self._store
        stage = f"Building the {self._settings.bits}-bit GPTQ draft"
        report = _Report(store.num_layers * store.num_experts, progress, cancel, self._between(pause), stage)
        report.tick()
        model = LayerwiseModel(skeleton, self._device)
        hidden = model.embed(self._tokens, BATCH)
        layers = iter(enumerate(skeleton.experts))
        for decoder_layer in range(model.num_layers):
            report.tick()
            routed = model.routed(decoder_layer, hidden, report.tick)
            outputs = None
            if routed is not None:
                layer, experts = next(layers)
                if not bool(torch.isfinite(routed.hidden).all()):
                    raise DraftError(
                        f"No draft can be built of this model: what enters the experts of decoder layer "
                        f"{decoder_layer} is not finite; delete the model and download it again."
                    )
                held_out = max(1, self._tokens.shape[0] // HELD_OUT) * self._tokens.shape[1]
                tokens = LayerTokens(routed.hidden, routed.index, routed.weights, held_out)
                weights = StoredLayer(experts, store, layer, self._device)
                budget = self._left_of_budget(model.layer_bytes(decoder_layer), tokens)
                problem = CalibratedLayer(tokens, weights, self._settings, budget)
                self._solve(problem, weights, decoder_layer, writer, report)
                outputs = problem.outputs
                del routed, tokens, problem
                if layer + 1 == store.num_layers:
                    report.tick()
                    return
            model.advance(decoder_layer, hidden, outputs, report.tick)

    def _between(self, pause: Callable[[], None] | None) -> Callable[[], None]:
        """What happens between pieces of work: others' turn, and what the allocator keeps for nothing goes
        back, since the next piece asks for blocks of other sizes."""

        def between() -> None:
            if self._device.type == "cuda":
                kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
                if kept > _KEPT_SHARE * self._budget:
                    torch.cuda.empty_cache()
            if pause is not None:
                pause()

        return between

    def _left_of_budget(self, layer_bytes: int, tokens: LayerTokens) -> int:
        """Device memory for a layer's experts, beside what runs the layer."""
        held = tokens.hidden.nbytes + tokens.index.nbytes + tokens.weights.nbytes + layer_bytes
        return self._budget - held - (_WORKSPACE_BYTES if self._device.type == "cuda" else 0)

    def _solve(
        self, problem: CalibratedLayer, weights: StoredLayer, layer: int, writer: DraftWriter, report: _Report
    ) -> None:
        """Quantise a layer's experts, or take them from the build that was ended; outputs of both are
        equal."""
        report.layer()
        with torch.inference_mode():
            if layer in writer.finished_layers:
                read = writer.read_layer(layer, self._store.num_experts, weights.up_shape)
                problem.replay(((weights.join(found[:-1]), found[-1]) for found in read), report.tick)
                report.replayed(self._store.num_experts)
                return
            try:
                writer.add_layer(layer, self._matrices(problem, weights, report))
            except ValueError as error:
                raise DraftError(
                    f"No draft can be built of this model: in decoder layer {layer}, {error}; download the "
                    "model again."
                ) from None

    def _matrices(
        self, problem: CalibratedLayer, weights: StoredLayer, report: _Report
    ) -> Iterator[ExpertMatrices]:
        started = time.perf_counter()
        for expert in problem.experts(report.tick):
            yield (*weights.split(expert.gate_up), expert.down)
            now = time.perf_counter()
            report.expert(expert, now - started)
            started = now
