"""A draft folder, ours or a ready-made GPTQ checkpoint: opens and checks it. Does not decide where a draft
lies, and takes nothing but experts from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localmoe.core.draft_config import DraftForm
from localmoe.core.errors import CheckpointError, DraftError, ModelNotFoundError, UnsupportedModelError
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.weight_files import read_json_object
from localmoe.kernels.codes import CodeMatrix
from localmoe.quant.draft_format import PROVENANCE_FILE, DraftProvenance
from localmoe.quant.draft_layout import read_draft_layout
from localmoe.quant.expert_names import ExpertNaming, Projection, find_naming
from localmoe.quant.expert_reader import ExpertReader, damaged
from localmoe.quant.matrix_layout import MatrixLayout


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A checked draft folder.

    Attributes:
        provenance: None in a GPTQ checkpoint that localmoe did not write.
        layout: of the matrices in the files.
    """

    folder: Path
    provenance: DraftProvenance | None
    layout: MatrixLayout
    _checkpoint: Checkpoint

    @classmethod
    def open(cls, folder: Path) -> DraftCheckpoint:
        """Check the folder's JSON files and the headers of its weight files; reads no weights.

        Raises:
            DraftError: the draft is missing, damaged, truncated, or neither in symmetric GPTQ format of 2, 3,
                4 or 8 bits nor in bitsandbytes' NF4.
        """
        try:
            checkpoint = Checkpoint.open(folder, as_stored=True)
        except ModelNotFoundError:
            raise DraftError(
                f"There is no draft in {folder}: build one with 'localmoe draft MODEL'."
            ) from None
        except UnsupportedModelError as error:
            raise DraftError(f"The draft in {folder} cannot be used: {error}") from None
        except CheckpointError as error:
            raise damaged(folder, str(error)) from error
        provenance = _read_provenance(folder)
        layout = read_draft_layout(folder, checkpoint.config, ready_made=provenance is None)
        if provenance is not None:
            described = (provenance.bits, provenance.group_size)
            if described != (layout.bits, layout.stored_group_size):
                raise damaged(folder, "its two descriptions of bits and group size differ")
        return cls(folder, provenance, layout, checkpoint)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.layout.bits

    @property
    def group_size(self) -> int:
        """Columns that share a scale in the matrices that are read."""
        return self.layout.group_size

    @property
    def form(self) -> DraftForm:
        """What its experts take in memory."""
        return DraftForm(self.bits, self.group_size, self.layout.codebook)

    @property
    def config(self) -> dict[str, object]:
        """What its config.json says."""
        return self._checkpoint.config

    def naming(self) -> ExpertNaming:
        """How its own tensors name single experts.

        Raises:
            DraftError: no expert has tensors of its own.
        """
        part = self.layout.code_part
        found = find_naming(self._checkpoint.tensors, part)
        if found is None:
            raise DraftError(
                f"The draft in {self.folder} has no quantised experts (tensors such as "
                f"model.layers.0.mlp.experts.0.gate_proj.{part}): build one with 'localmoe draft MODEL'."
            )
        return found

    def check_base(self, fingerprint: str, name: str, revision: str = "") -> None:
        """Hold a draft that localmoe made against the model `name` whose checkpoint has this fingerprint and
        this Hub revision ("": unknown). A ready-made checkpoint passes: base_check holds it against the
        weights.

        Raises:
            DraftError: it belongs to another model, or to another revision of it.
        """
        base = self.provenance
        if base is None:
            return
        if base.base_fingerprint != fingerprint:
            raise DraftError(
                f"The draft in {self.folder} belongs to another model ({base.base_model}, fingerprint "
                f"{base.base_fingerprint[:12]}) and not to {name} ({fingerprint[:12]}): build one with "
                f"'localmoe draft {name}'."
            )
        if base.base_revision and revision and base.base_revision != revision:
            raise DraftError(
                f"The draft in {self.folder} belongs to revision {base.base_revision[:12]} of "
                f"{base.base_model} and not to {revision[:12]}: build one with 'localmoe draft {name}'."
            )

    def matrix(
        self,
        naming: ExpertNaming,
        decoder_layer: int,
        expert: int,
        projection: Projection,
        shape: tuple[int, int],
    ) -> CodeMatrix:
        """One expert's matrix of `shape` (N, K), in memory of its own.

        Raises:
            DraftError: a tensor is missing, damaged, or of another shape.
        """
        return self.reader(naming).matrix(decoder_layer, expert, projection, shape)

    def reader(self, naming: ExpertNaming) -> ExpertReader:
        """Of its experts, which its tensors name so."""
        return ExpertReader(self.folder, self._checkpoint.tensors, self.layout, naming)


def _read_provenance(folder: Path) -> DraftProvenance | None:
    path = folder / PROVENANCE_FILE
    if not path.exists():
        return None
    try:
        return DraftProvenance.from_json(read_json_object(path))
    except (CheckpointError, ValueError) as error:
        raise damaged(folder, f"{PROVENANCE_FILE}: {error}") from None
