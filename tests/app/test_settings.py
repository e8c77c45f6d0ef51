"""Settings: ranges, sentences, and what is kept on disk."""

from __future__ import annotations

import json
import math
import os
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from app.files import write_json
from app.settings import AnswerSettings, LoadSettings, SettingsStore, check_answers, parse_budget
from localmoe.core.config import SamplingConfig
from localmoe.core.errors import ConfigError

OWN = SamplingConfig(1.0, 0.95, 64)  # recommended by a model's makers


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("temperature", -0.1, "Temperature"), ("temperature", math.nan, "Temperature"),
        ("temperature", 1e9, "Temperature"),
        ("temperature", None, "Temperature"), ("temperature", "warm", "Temperature"), ("top_p", 0, "Top-p"),
        ("top_p", 1.5, "Top-p"), ("top_p", math.inf, "Top-p"), ("top_k", -1, "Top-k"),
        ("top_k", 2.5, "Top-k"),
        ("top_k", None, "Top-k"), ("top_k", 1e300, "Top-k"), ("min_p", -1, "Min-p"), ("min_p", 2, "Min-p"),
        ("repetition_penalty", 0, "Repetition penalty"), ("max_new_tokens", 0, "Max new tokens"),
        ("max_new_tokens", 10**9, "Max new tokens"), ("max_new_tokens", math.nan, "Max new tokens"),
        ("max_new_tokens", True, "Max new tokens"), ("seed", -1, "Seed"), ("seed", "abc", "Seed"),
        ("seed", 2**64, "Seed"),
        ("seed", "9" * 400, "Seed"), ("draft_length", -1, "Draft length"),
        ("draft_length", 65, "Draft length"),
        ("draft_length", 2.5, "Draft length"), ("draft_length", None, "Draft length"),
        ("draft_length", math.inf, "Draft length"),
        ("thinking", "loud", "Thinking"), ("policy", "magic", "policy"),
        ("system_prompt", "x" * 20_001, "system prompt"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_in_one_sentence(name: str, value: Any, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_answers({name: value})
    sentence = str(caught.value)
    assert word in sentence and "\n" not in sentence and sentence[-1] in ".'\""


def test_good_values_are_taken_as_the_form_sends_them() -> None:
    found = check_answers(
        {
            "draft_length": 8.0, "policy": "on-demand", "temperature": 0, "top_p": 1, "top_k": 40.0,
            "min_p": 0.05,
            "repetition_penalty": 1.1, "max_new_tokens": 64.0, "seed": " 9007199254740993 ",
            "system_prompt": None,
        }
    )  # fmt: skip
    assert found == AnswerSettings(8, "on-demand", 0.0, 1.0, 40, 0.05, 1.1, 64, 9007199254740993, "")
    assert found.sampling().greedy


@pytest.mark.parametrize(("own", "used"), [(True, OWN), (False, SamplingConfig(0.4, 0.95, 0, 0.0, 1.05))])
def test_the_makers_own_sampling_stands_in_for_the_numbers_and_never_for_the_seed(
    own: bool, used: SamplingConfig
) -> None:
    answers = check_answers({"temperature": 0.4, "seed": "7", "own_sampling": own})
    assert answers.sampling(OWN) == replace(used, seed=7)
    assert answers.sampling() == SamplingConfig(0.4, 0.95, 0, 0.0, 1.05, 7)  # nothing is recommended


# what an earlier version kept of somebody who has changed none of it
BEFORE = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("kept", "own", "length"),
    [
        ({}, True, 8192), ({**BEFORE, "max_new_tokens": 1024, "seed": 7}, True, 8192),
        ({**BEFORE, "max_new_tokens": 64}, True, 64), ({**BEFORE, "temperature": 0.0}, False, 8192),
        ({"top_k": 7, "max_new_tokens": 2048}, False, 2048), ({**BEFORE, "min_p": 0.05}, False, 8192),
        ({**BEFORE, "repetition_penalty": 1}, False, 8192), ({"top_p": 7}, True, 8192),  # as if not there
        ({**BEFORE, "temperature": 0.0, "max_new_tokens": 1024, "own_sampling": True}, True, 1024),
        ({**BEFORE, "max_new_tokens": 1024, "own_sampling": False}, False, 1024),
    ],
)  # fmt: skip
def test_whoever_changed_a_number_of_an_earlier_version_goes_on_with_it(
    kept: dict[str, Any], own: bool, length: int, tmp_path: Path
) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"schema": 1, "load": {}, "answers": kept}))
    answers = SettingsStore(path).answers
    assert (answers.own_sampling, answers.max_new_tokens) == (own, length)
    SettingsStore(path).save(answers=answers)
    assert SettingsStore(path).answers == answers


@pytest.mark.parametrize(
    ("text", "size"), [("auto", None), ("", None), (" AUTO ", None), ("12GiB", 12 << 30)]
)
def test_a_budget_is_auto_or_a_size(text: str, size: int | None) -> None:
    assert parse_budget(text) == size


@pytest.mark.parametrize(
    "settings",
    [
        LoadSettings(vram_budget="lots"), LoadSettings(vram_budget="-1GiB"), LoadSettings(vram_budget="0"),
        LoadSettings(vram_budget="nan"), LoadSettings(context="15"), LoadSettings(context="-5"),
        LoadSettings(context="9" * 30),
        LoadSettings(context="1e3"), LoadSettings(emulated_link="fast"), LoadSettings(emulated_link="0"),
        LoadSettings(model=" "), LoadSettings(better_draft="perhaps"), LoadSettings(better_draft=""),
    ],
)  # fmt: skip
def test_load_settings_out_of_range_are_refused(settings: LoadSettings) -> None:
    with pytest.raises(ConfigError):
        settings.engine_config(AnswerSettings())


def test_load_settings_become_the_engines_configuration() -> None:
    config = LoadSettings("m", "2GiB", "4096", "2GB/s").engine_config(AnswerSettings(draft_length=3))
    assert (config.vram_budget_bytes, config.context, config.draft_length) == (2 << 30, 4096, 3)
    assert config.emulated_link_bytes_per_s == 2e9


@pytest.mark.parametrize(("text", "wanted"), [("on", True), ("off", False), (" ON ", True), ("Off", False)])
def test_the_better_drafts_switch_is_on_or_off(text: str, wanted: bool) -> None:
    assert LoadSettings(better_draft=text).engine_config(AnswerSettings()).improve_draft is wanted


def test_a_better_draft_is_built_unless_the_user_says_no() -> None:
    assert LoadSettings().engine_config(AnswerSettings()).improve_draft


def test_settings_from_before_the_switch_are_read_and_the_switch_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    load = {"model": "m", "vram_budget": "3GiB", "context": "512", "emulated_link": ""}
    path.write_text(json.dumps({"schema": 1, "load": load, "answers": {"top_k": 7}}))
    old = SettingsStore(path)
    assert (old.load, old.answers.top_k, old.report) == (LoadSettings("m", "3GiB", "512"), 7, "")
    old.save(load=LoadSettings(better_draft="off"))
    assert SettingsStore(path).load == LoadSettings(better_draft="off")


def test_a_full_disk_is_one_sentence_and_what_was_kept_stays_in_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SettingsStore(tmp_path / "settings.json")
    store.save(load=LoadSettings(vram_budget="3GiB"), answers=AnswerSettings(seed=7))

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError) as caught:
        store.save(load=LoadSettings(vram_budget="4GiB"), answers=AnswerSettings(seed=8))
    assert str(caught.value) == (
        f"The settings could not be saved in {tmp_path} (No space left on device): make room there and try "
        "again."
    )
    assert (store.load.vram_budget, store.answers.seed) == ("3GiB", 7)
    again = SettingsStore(tmp_path / "settings.json")
    assert (again.load, again.answers, again.report) == (store.load, store.answers, "")


def test_a_damaged_setting_on_a_full_disk_leaves_the_file_where_the_next_start_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    content = json.dumps({"load": {"model": "m", "context": "wide"}, "answers": {"seed": 7}})
    path.write_text(content)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    store = SettingsStore(path)
    assert (store.load, store.answers.seed) == (LoadSettings("m"), 7)
    assert "context" in store.report and "make room" in store.report
    assert [found.name for found in tmp_path.iterdir()] == ["settings.json"] and path.read_text() == content


def test_a_system_prompt_that_is_no_unicode_is_mended_and_can_be_kept(tmp_path: Path) -> None:
    answers = check_answers({"system_prompt": "x\ud800y"})
    assert answers.system_prompt == "x?y"
    SettingsStore(tmp_path / "settings.json").save(answers=answers)
    assert SettingsStore(tmp_path / "settings.json").answers.system_prompt == "x?y"


@pytest.mark.parametrize("name", ["model", "draft"])
def test_a_folder_whose_name_is_no_unicode_is_refused(tmp_path: Path, name: str) -> None:
    wanted = LoadSettings(**{name: "/models/caf\udce9"})
    with pytest.raises(ConfigError, match=rf"name of the {name}, /models/caf\?, .* rename the folder"):
        wanted.engine_config(AnswerSettings())
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"load": {name: "a\udce9", "vram_budget": "3GiB"}, "answers": {}}))
    assert SettingsStore(path).load == LoadSettings(vram_budget="3GiB")


def test_settings_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    SettingsStore(path).save(load=LoadSettings(vram_budget="3GiB"))
    SettingsStore(path).save(answers=AnswerSettings(draft_length=0, seed=7, system_prompt="Be kind."))
    found = SettingsStore(path)
    assert (found.load.vram_budget, found.answers.seed, found.report) == ("3GiB", 7, "")
    assert found.answers.system_prompt == "Be kind."


@pytest.mark.parametrize(
    "content",
    [
        "", "{}", "[]", "[" * 100_000, '{"load": {"vram_budget": "x"}, "answers": {}}',
        '{"load": {}, "answers": {"top_p": 7}}',
        '{"load": {}, "answers": {"temperature": 1%s}}' % ("0" * 400),
        '{"load": {"better_draft": "perhaps"}, "answers": {}}',
    ],
)  # fmt: skip
def test_damaged_settings_are_kept_aside_and_the_usual_ones_used(tmp_path: Path, content: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(content)
    store = SettingsStore(path)
    assert store.load == LoadSettings() and store.answers == AnswerSettings()
    (kept,) = tmp_path.glob("*.damaged")
    assert kept.name in store.report and kept.read_text() == content


def test_what_a_newer_version_has_saved_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    load, answers = {"model": "m", "card": "2"}, {"seed": 7, "moods": {"calm": [1, None]}}
    path.write_text(json.dumps({"schema": 3, "load": load, "answers": answers, "page": {"zoom": 2}}))
    store = SettingsStore(path)
    assert (store.load, store.answers.seed, store.report) == (LoadSettings("m"), 7, "")
    store.save(load=LoadSettings("n", "3GiB"))
    store.save(answers=AnswerSettings(seed=8))
    data = json.loads(path.read_text())
    assert (data["schema"], data["page"]) == (3, {"zoom": 2})
    assert data["load"] == {**asdict(LoadSettings("n", "3GiB")), "card": "2"}
    assert data["answers"] == {**asdict(AnswerSettings(seed=8)), "moods": answers["moods"]}


@pytest.mark.parametrize("value", ["a\ud800", {"\ud800": 1}])
def test_what_no_file_can_hold_keeps_no_settings_from_being_saved(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"schema": "x", "load": {"odd": value}, "answers": {}, "other": value}))
    SettingsStore(path).save(answers=AnswerSettings(seed=8))
    data = json.loads(path.read_text())
    assert data == {"schema": 2, "load": asdict(LoadSettings()), "answers": asdict(AnswerSettings(seed=8))}


class Killed(BaseException):
    """The process ends here."""


def test_a_kill_while_a_file_is_mended_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"load": {"model": "m", "context": "wide"}, "answers": {"seed": 7}}))

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("app.settings.write_json", kill)
        SettingsStore(path)
    store = SettingsStore(path)
    assert (store.load, store.answers.seed) == (LoadSettings("m"), 7) and "context" in store.report
    assert SettingsStore(path).report == "", "it was mended, and said"


def test_damaged_settings_are_told_at_each_start_until_there_are_others(tmp_path: Path) -> None:
    """A process may be killed before its page was read."""
    path = tmp_path / "settings.json"
    path.write_text("{")
    first, second = SettingsStore(path), SettingsStore(path)
    (kept,) = tmp_path.glob("*.damaged")
    assert first.report == second.report and kept.name in first.report
    second.save(load=LoadSettings("m"))
    assert SettingsStore(path).report == ""


def test_a_disk_without_hard_links_keeps_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "settings.json"
    content = json.dumps({"load": {"context": "wide"}, "answers": {"seed": 7}})
    path.write_text(content)
    assert SettingsStore(path).answers.seed == 7
    (kept,) = tmp_path.glob("*.damaged")
    assert kept.read_text() == content


def test_one_damaged_setting_leaves_all_others_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    load = LoadSettings(
        "m", "3GiB", draft_bits="2", lanes="vram+link", cpu_threads="3", drafter="mtp", experts_on="disk",
        ram_budget="5GiB",
    )  # fmt: skip
    SettingsStore(path).save(load=load, answers=AnswerSettings(seed=7, approximate=True))
    data = json.loads(path.read_text())
    data["load"]["context"], data["answers"]["top_p"] = "wide", 7
    path.write_text(json.dumps(data))
    store = SettingsStore(path)
    assert (store.load, store.answers) == (load, AnswerSettings(seed=7, approximate=True))
    assert "context" in store.report and "top_p" in store.report
    again = SettingsStore(path)
    assert (again.load, again.answers, again.report) == (load, store.answers, "")
    config = load.engine_config(store.answers)
    assert (config.draft_bits, config.lanes, config.cpu_threads) == (2, "vram+link", 3)
    assert (config.drafter, config.experts_on, config.ram_budget_bytes) == ("mtp", "disk", 5 << 30)


@pytest.mark.parametrize(
    "settings",
    [LoadSettings(draft_bits="5"), LoadSettings(draft_bits="x"), LoadSettings(lanes="all of them"),
     LoadSettings(cpu_threads="0"), LoadSettings(cpu_threads="many"), LoadSettings(experts_on="tape"),
     LoadSettings(ram_budget="much"), LoadSettings(ram_budget="0", experts_on="disk")],
)  # fmt: skip
def test_drafts_lanes_and_threads_out_of_range_are_refused(settings: LoadSettings) -> None:
    with pytest.raises(ConfigError):
        settings.engine_config(AnswerSettings())


def test_a_drafter_is_one_that_the_page_offers_and_reads_no_folder(tmp_path: Path) -> None:
    for text in ("prompt-lookup", "model", "", "both"):
        with pytest.raises(ConfigError, match="is not known: use one of auto, self, mtp"):
            LoadSettings(drafter=text).engine_config(AnswerSettings())
    assert LoadSettings(drafter=" MTP ").engine_config(AnswerSettings()).drafter == "mtp"
    with pytest.raises(ConfigError, match="choose one of them"):
        LoadSettings(draft="/drafts/gptq", drafter="mtp").engine_config(AnswerSettings())
    path = tmp_path / "settings.json"
    load = {"model": "m", "draft": "/drafts/gptq", "drafter": "mtp"}
    path.write_text(json.dumps({"schema": 1, "load": load, "answers": {}}))
    store = SettingsStore(path)
    assert store.load == LoadSettings("m", draft="/drafts/gptq") and "for drafter" in store.report


@pytest.mark.parametrize(("schema", "meant"), [(1, "auto"), (2, "self")])
def test_what_left_the_drafter_to_the_engine_still_does(schema: int, meant: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"schema": schema, "load": {"model": "m", "drafter": "self"}, "answers": {}}))
    store = SettingsStore(path)
    assert (store.load, store.report) == (LoadSettings("m", drafter=meant), "")
    store.save()
    assert SettingsStore(path).load == store.load


def test_two_threads_that_save_at_once_undo_nothing_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, both = SettingsStore(tmp_path / "settings.json"), threading.Barrier(2)

    def slow(path: Path, value: object) -> None:
        with suppress(threading.BrokenBarrierError):  # the other one waits until this one has written
            both.wait(0.3)
        write_json(path, value)

    monkeypatch.setattr("app.settings.write_json", slow)
    kinds = ({"load": LoadSettings(model="m")}, {"answers": AnswerSettings(seed=7)})
    threads = [threading.Thread(target=store.save, kwargs=kind) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = SettingsStore(tmp_path / "settings.json")
    assert (found.load.model, found.answers.seed) == ("m", 7)
