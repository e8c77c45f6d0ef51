"""A Models tab on a computer whose RAM holds a small model and not a large one; both are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app_process import wait_for

from app.models.fits import Fits
from app.models.service import ModelsService
from app.service import ChatService
from localmoe.engine.suggestions import SUGGESTIONS
from localmoe.hardware.facts import Hardware
from localmoe.hub.local_models import LocalModel

GIB = 1 << 30
COMPUTER = Hardware(
    (), "", "a CPU", 8, 16, (), 16 * GIB, 15 * GIB, 100 * GIB, 20e9, "Linux", "3.12", "2"
)  # fmt: skip
FACTS = {one.repo_id: one.facts for one in SUGGESTIONS}
LARGE, SMALL = "Qwen/Qwen1.5-MoE-A2.7B-Chat", "ibm-granite/granite-3.1-1b-a400m-instruct"


@contextmanager
def models_with_little_ram(service: ChatService, home: Path) -> Iterator[ModelsService]:
    """Not started: what is in the queue waits."""
    made = ModelsService(home, service, {})
    made.fits = Fits(
        home / "hardware.json", service.holder.status, made._load_config, lambda: False,
        lambda measure: COMPUTER,
    )  # fmt: skip
    sizes = {name: FACTS[name].num_bytes for name in (LARGE, SMALL)}
    made.shelf._models = lambda: [
        LocalModel(name, home / name, size, "moe", (), "localmoe") for name, size in sizes.items()
    ]
    made.shelf._facts = FACTS.__getitem__
    made.shelf.refresh(closely=True)
    wait_for(lambda: made.fits.hardware() is not None and made.fits.measured, 60, "the machine")
    wait_for(lambda: len(made.shelf.view().facts) == 2, 60, "the models")
    yield made
    made.close()


def set_computer(models: ModelsService, computer: Hardware) -> None:
    """Another one from here on, whatever is looked at."""
    models.fits._hardware, models.fits._looked = computer, float("inf")
