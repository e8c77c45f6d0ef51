"""The life of a draft's folder: a temporary sibling, taken over from an ended build, swapped in at the end.
Does not know what the files hold."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from localmoe.core.errors import DraftError
from localmoe.core.units import format_bytes
from localmoe.core.whole_file import check_writable, sync_folder
from localmoe.hub.disk import is_full
from localmoe.hub.process_marks import is_running, own_mark
from localmoe.quant.draft_format import PROVENANCE_FILE, DraftProvenance
from localmoe.quant.draft_progress import STATE_FILE, DraftProgress

_OUR_FILES = re.compile(
    r"(localmoe_draft|config|quantize_config|model\.safetensors\.index|build_state)\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors"
)
_MARGIN_BYTES = 16 << 20  # JSON files and the file system's own blocks


class DraftPlaceError(DraftError):
    """Something else is where the draft is to lie."""


class DraftWriteError(DraftError):
    """The operating system refused to write; what is on the disk already is fine."""


@contextmanager
def write_errors(out: Path) -> Iterator[None]:
    """Turn an operating system's refusal into a DraftError."""
    try:
        yield
    except OSError as error:
        raise DraftWriteError(
            f"Writing the draft to {out} failed ({error.strerror or error}): "
            f"{'free some disk space' if is_full(error) else 'choose another folder'} and build it again."
        ) from error


class DraftFolder:
    """A draft folder under construction; `out` changes only in `publish`.

    The temporary names carry the process id and its start time, so that leftovers of a killed build are told
    from a build that still runs. A build that was stopped on purpose leaves its folder under another name.
    """

    def __init__(self, out: Path, provenance: DraftProvenance) -> None:
        self.out = Path(os.path.realpath(out))  # unlike Path.resolve, no RuntimeError for a loop of links
        self._provenance = provenance
        self._mark = own_mark()
        self.path = self._sibling("building")
        self.progress = DraftProgress(self.path, provenance)
        self._stopped = self._sibling("stopped")
        self._old = self._sibling("replaced")

    def check(self) -> None:
        """See that a draft can be put there, before the work that it takes. Makes nothing.

        Raises:
            DraftError: `out` holds something else, or nothing can be written there.
        """
        self._check_target()
        folder = next(parent for parent in self.out.parents if os.path.lexists(parent))
        with write_errors(self.out):
            check_writable(folder / f"{self.path.name}.json")

    def create(self, needed_bytes: int, free_bytes: Callable[[Path], int]) -> None:
        """Check the place and make the temporary folder, with the finished layers of an ended build of the
        same recipe.

        Raises:
            DraftError: `out` holds something else, is being built already, or the disk is too full.
        """
        self._check_target()
        with write_errors(self.out):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._claim_leftovers()
            try:
                self.progress.begin()
            except BaseException:  # also a user who does not wait for the check of a long draft
                self._leave()
                raise
            free = free_bytes(self.out.parent)
        needed_bytes = max(0, needed_bytes - self.progress.num_bytes)
        if free < needed_bytes + _MARGIN_BYTES:
            self.set_aside()
            raise DraftError(
                f"The draft needs {format_bytes(needed_bytes + _MARGIN_BYTES)} of disk space and "
                f"{self.out.parent} has {format_bytes(free)} free: free some, or choose a folder on another "
                "disk."
            )

    def publish(self) -> Path:
        """Swap the finished folder in; an older draft of the same model is removed."""
        self._check_target()
        with write_errors(self.out):
            sync_folder(self.path)
            self._swap()
            sync_folder(self.out.parent)
        with suppress(
            OSError
        ):  # last, as finished layers are lost without it; beside a draft it does no harm
            (self.out / STATE_FILE).unlink()
        shutil.rmtree(self._old, ignore_errors=True)  # what stays is removed by the next build
        return self.out

    def discard(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self.path, ignore_errors=True)

    def set_aside(self) -> None:
        """Keep the finished layers, if any, for a next build, which may come from this very process."""
        if self.progress.finished_layers:
            self._leave()
        else:
            self.discard()

    def _leave(self) -> None:
        """Give the folder a name that says that nobody works in it; remove one without a shard."""
        if not any(self.path.glob("*.safetensors")):
            self.discard()
            return
        shutil.rmtree(self._stopped, ignore_errors=True)
        with suppress(OSError):  # it keeps its name, and is free once this process has ended
            self.path.rename(self._stopped)

    def _swap(self) -> None:
        had_old = self.out.exists()
        if had_old:
            self.out.rename(self._old)
        try:
            self.path.rename(self.out)
        except OSError:
            if had_old:
                self._old.rename(self.out)
            raise

    def _sibling(self, purpose: str) -> Path:
        return self.out.parent / f".{self.out.name}.{purpose}-{self._mark}"

    def _claim_leftovers(self) -> None:
        """Make the fullest folder of an ended build ours, or a new one, and remove the others.

        Raises:
            DraftError: a build is running.
        """
        found = self._siblings()
        self._refuse_running(found)
        unfinished = [path for path, match in found if match[1] != "replaced"]
        for path in sorted(unfinished, key=lambda path: -len(list(path.iterdir()))):
            if not self.path.exists():
                with suppress(FileNotFoundError):  # another build was faster: it is seen below
                    path.rename(self.path)
        for path, _ in found:
            shutil.rmtree(path, ignore_errors=True)  # gone, if it is ours now
        self.path.mkdir(exist_ok=True)
        try:
            self._refuse_running([(path, match) for path, match in self._siblings() if path != self.path])
        except DraftError:
            self._leave()
            raise

    def _siblings(self) -> list[tuple[Path, re.Match[str]]]:
        """Temporary folders of all builds of `out`: purpose, process id and its start time."""
        pattern = re.compile(rf"\.{re.escape(self.out.name)}\.(building|stopped|replaced)-(\d+)-(\d+)")
        matches = ((path, pattern.fullmatch(path.name)) for path in self.out.parent.iterdir())
        return [(path, match) for path, match in matches if match]

    def _refuse_running(self, siblings: list[tuple[Path, re.Match[str]]]) -> None:
        for _, match in siblings:
            if match[1] == "building" and is_running(int(match[2]), int(match[3])):
                raise DraftError(
                    f"The draft {self.out} is being built by process {match[2]}: wait for it, or end it "
                    "first."
                )

    def _check_target(self) -> None:
        """`out` may be absent, empty, or a draft of the same model; no mount point, as nothing can be renamed
        to one."""
        if os.path.ismount(self.out):
            raise DraftPlaceError(
                f"{self.out} is a mount point, which a draft cannot replace: give a folder inside it."
            )
        if not os.path.lexists(self.out):
            return
        if self.out.is_dir():
            names = {path.name for path in self.out.iterdir()}
            if not names:
                return
            if PROVENANCE_FILE in names and all(_OUR_FILES.fullmatch(name) for name in names):
                self._check_same_model()
                return
        raise DraftPlaceError(
            f"{self.out} holds something that is not a draft, and is left as it is: choose another folder."
        )

    def _check_same_model(self) -> None:
        try:
            values = json.loads((self.out / PROVENANCE_FILE).read_text("utf-8"))
            found = DraftProvenance.from_json(values if isinstance(values, dict) else {})
        except (OSError, ValueError, RecursionError):
            return  # a damaged draft may be replaced
        if self._provenance.base_model != found.base_model and (
            self._provenance.base_fingerprint != found.base_fingerprint
        ):
            raise DraftPlaceError(
                f"{self.out} holds a draft of {found.base_model}, not of {self._provenance.base_model}: "
                "choose another folder, or remove it first."
            )
