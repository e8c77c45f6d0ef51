"""What a model on this computer needs, found out by a process of its own, as a config may keep it busy for
ever, fill memory, or crash it. One question at a time, so that a process that is ended loses no other answer.
Keeps no answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import psutil

from app.models.hub_client import COMMAND, HubClient, HubProcessError, online_environment
from localmoe.core.errors import LocalMoeError
from localmoe.core.model_facts import ModelFacts
from localmoe.core.units import format_bytes

START_S = 300.0  # from a slow disk: its libraries are some thousand files
LOOK_S = 60.0  # of one model; the largest take a second of a core, a thousand layers nine
MOST_BYTES = 3 << 30  # resident in it; the largest models take 0.6 GiB
_IDLE_S = 10.0  # what is asked next is rarely soon, and its memory is worth more to a model


class UnansweredError(LocalMoeError):
    """The process ended, or had to be ended, over this very question; asked again, it most likely would be
    once more."""


def offline_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a process that may not ask the Hub. environment: as the user started localmoe."""
    return {**online_environment(environment), "HF_HUB_OFFLINE": "1"}


class Looker:
    """Asked by one thread at a time. Its process is another one than that which asks the Hub, whose downloads
    go on when this one is ended."""

    def __init__(
        self, environment: Mapping[str, str], command: tuple[str, ...] = COMMAND, *,
        start_s: float = START_S, look_s: float = LOOK_S, most_bytes: int = MOST_BYTES,
    ) -> None:  # fmt: skip
        """environment: as the user started localmoe."""
        self._client = HubClient(offline_environment(environment), command, idle_s=_IDLE_S)
        self._start_s, self._look_s, self._most_bytes = start_s, look_s, most_bytes

    def facts(self, model: str) -> ModelFacts:
        """`engine.facts.local_facts` of a model by its name.

        Raises:
            LocalMoeError: as that does; UnansweredError: the process gave no answer.
        """
        try:
            self._client.call("prepare", {}, watch=self._limits(model, self._start_s))
            found = self._client.call(
                "local_facts", {"model": model}, watch=self._limits(model, self._look_s)
            )
        except HubProcessError as error:
            raise UnansweredError(
                f"The process that looked at {model} failed, so what it needs is not known: its config.json "
                "may be damaged; the terminal window shows the details."
            ) from error
        return ModelFacts.from_dict(found)

    def close(self) -> None:
        """End the process, and what is asked of it."""
        self._client.close(patience_s=0.0)

    def _limits(self, model: str, most_s: float) -> Callable[[int], None]:
        """What raises once the process has taken too long, or too much memory."""
        end = time.monotonic() + most_s

        def watch(pid: int) -> None:
            if time.monotonic() > end:
                raise UnansweredError(
                    f"Looking at {model} took more than {most_s:.0f} s, so what it needs is not known: its "
                    "config.json may be damaged, or its disk does not answer."
                )
            if _resident_bytes(pid) > self._most_bytes:
                raise UnansweredError(
                    f"Looking at {model} took more than {format_bytes(self._most_bytes)} of RAM, so what it "
                    "needs is not known: its config.json may be damaged."
                )

        return watch


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has ended: its end is an answer as well
        return 0
