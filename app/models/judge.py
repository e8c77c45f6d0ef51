"""Whether a model of a list runs, and from where: RAM, unless the disk was chosen for it, or RAM alone
refuses it. Loads nothing."""

from __future__ import annotations

from dataclasses import replace

from app.models.service import ModelsService
from localmoe.core.config import EngineConfig
from localmoe.core.errors import LocalMoeError
from localmoe.core.model_facts import Fit, ModelFacts


def judge(models: ModelsService, name: str, facts: ModelFacts, *, download_bytes: int = 0) -> Fit | None:
    """With the settings with which a button of its card would load it; None until the machine is known."""
    in_ram, on_disk = _configs(models)
    if models.chats.load_settings.of_model(name).experts_on == "disk":
        return models.fits.fit(facts, download_bytes=download_bytes, config=on_disk)
    return models.fits.fit(facts, download_bytes=download_bytes, config=in_ram, on_disk=on_disk)


def judge_in_ram(models: ModelsService, facts: ModelFacts, *, download_bytes: int = 0) -> Fit | None:
    """From there alone, as for what is proposed."""
    return models.fits.fit(facts, download_bytes=download_bytes, config=_configs(models)[0])


def _configs(models: ModelsService) -> tuple[EngineConfig, EngineConfig]:
    """The settings of the next load, with experts in RAM and on the disk."""
    settings, answers = models.chats.load_settings, models.chats.answers
    try:
        in_ram = replace(settings, experts_on="ram").engine_config(answers)
        return in_ram, replace(settings, experts_on="disk").engine_config(answers)
    except LocalMoeError:  # one that makes no sense
        return EngineConfig(), EngineConfig(experts_on="disk")
