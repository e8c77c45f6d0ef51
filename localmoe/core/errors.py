"""Every error that a user can mend: one clear sentence with the numbers and the remedy. Programmer errors
are asserts."""

from __future__ import annotations


def sentence_of(error: BaseException, max_chars: int = 240) -> str:
    """A library's error as one sentence: white space folded, the first sentence of it, with a full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    first = text.split(". ", 1)[0][:max_chars].rstrip(" .:,;")
    return f"{first}."


class LocalMoeError(Exception):
    """Root of all user-facing errors; the command line turns it into one sentence and exit code 1."""


class ModelNotFoundError(LocalMoeError):
    """The given folder, repo id or name is no model that is on this machine."""


class UnsupportedModelError(LocalMoeError):
    """The checkpoint is readable, but not a Mixture-of-Experts model that the engine can take over."""


class CheckpointError(LocalMoeError):
    """A weight file is missing, truncated or not what its index says."""


class BudgetError(LocalMoeError):
    """The VRAM budget or the host RAM does not hold what the request needs.

    Attributes:
        budget_bytes: a budget that would work on its own; None where none is known to.
        context: tokens of context that would fit the budget that was given; None where none would.
    """

    def __init__(self, text: str, *, budget_bytes: int | None = None, context: int | None = None) -> None:
        super().__init__(text)
        self.budget_bytes = budget_bytes
        self.context = context


class DownloadError(LocalMoeError):
    """A model cannot be brought from the Hub, or not now; what has arrived is kept."""


class HubUnreachableError(DownloadError):
    """The Hub does not answer, or this process is told to stay offline."""


class RepoNotFoundError(DownloadError):
    """The Hub has no such repo, or none that this user may see."""


class GatedModelError(DownloadError):
    """The repo's owner decides who may download it."""


class DiskFullError(DownloadError):
    """The disk does not hold the model."""


class DiskError(LocalMoeError):
    """A file of experts cannot be written to the disk, or read from it."""


class DownloadCancelledError(DownloadError):
    """The user stopped or paused a download."""


class DraftError(LocalMoeError):
    """A draft is missing, damaged, or belongs to another model."""


class NoMtpLayerError(DraftError):
    """The model has no layer that predicts one token more (MTP), or none that can draft."""


class DraftingRefusedError(LocalMoeError):
    """The model cannot be drafted for, e.g. because its recurrent state cannot be rolled back."""


class ContextLengthError(LocalMoeError):
    """The prompt, of so many tokens at least, does not fit the context."""

    def __init__(self, text: str, *, num_tokens: int, context: int) -> None:
        super().__init__(text)
        self.num_tokens, self.context = num_tokens, context


class ConfigError(LocalMoeError):
    """A setting is out of range."""


class EngineClosedError(LocalMoeError):
    """The engine was closed, or is busy with another answer."""


class TransferError(LocalMoeError):
    """A host-to-device copy failed; the step that waited for it was abandoned and the state rolled back."""


class HardwareError(LocalMoeError):
    """The requested device is not there."""


class LoadCancelledError(LocalMoeError):
    """The user stopped a load."""


class EngineBusyError(LocalMoeError):
    """Another answer is being written."""
