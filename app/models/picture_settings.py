"""How a model reads pictures is said by a small file, which older versions of localmoe left out of a
download: which models lack it, what to do, and getting it. Reads no such file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.texts import ENGLISH, Texts
from localmoe.core.errors import ConfigError, LocalMoeError
from localmoe.hub.download_record import DownloadRecord
from localmoe.hub.local_models import LocalModel, resolve_model
from localmoe.hub.picture_settings import PROCESSOR_FILES, settings_file
from localmoe.model.vision_kinds import KINDS

if TYPE_CHECKING:
    from app.models.service import ModelsService


def lacks_settings(model: LocalModel) -> bool:
    """Whether it could read pictures, but does not know how; it runs as one that reads none."""
    return model.architecture in KINDS and settings_file(model.folder) is None


def why_unread(model: str, t: Texts = ENGLISH) -> str:
    """Why a model that could read pictures reads none, and what to do; "" of any other. model: by the name,
    or the folder, that it was loaded by."""
    try:
        found = resolve_model(model)
    except LocalMoeError:
        return ""
    if not lacks_settings(found):
        return ""
    if _revision(found.folder):
        return t(
            "{model} was downloaded without what says how it reads pictures: press {button} under Models, "
            "then attach them again.", model=found.name, button=t("Get its picture settings"),
        )  # fmt: skip
    return t(
        "{model} lacks what says how it reads pictures: put its makers' {file} into its folder and load it "
        "again.", model=found.name, file=PROCESSOR_FILES[0],
    )  # fmt: skip


def can_get_settings(model: LocalModel) -> bool:
    """Whether the file is missing where a download brings it: in a model that localmoe has downloaded."""
    return lacks_settings(model) and bool(_revision(model.folder))


def get_settings(models: ModelsService, name: str) -> str:
    """Fetch what a model lacks, of the revision that is here: its weights stay. One that is loaded is loaded
    again once that has come (`ModelsService`).

    Raises:
        ConfigError: nothing is missing any more.
    """
    found = [model for model in models.shelf.view().models if model.name == name]
    if not found or not can_get_settings(found[0]):
        raise ConfigError(f"{name} has what it needs already: load it again.")
    models.queue.add(name, _revision(found[0].folder))
    return ""


def _revision(folder: Path) -> str:
    record = DownloadRecord.read(folder)
    return "" if record is None else record.revision
