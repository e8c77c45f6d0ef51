"""Named settings: kept, found again, checked."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from app.files import write_json
from app.presets import FIELDS, MAX_PRESETS, Presets
from app.settings import MAX_SYSTEM_PROMPT, AnswerSettings, check_answers
from localmoe.core.errors import ConfigError

ANSWERS = AnswerSettings(system_prompt="Be brief.", temperature=0.2, top_k=40, max_new_tokens=5)


def test_presets_are_found_again_by_kind_and_name(tmp_path: Path) -> None:
    presets = Presets(tmp_path / "presets.json")
    assert presets.save("prompt", "  short\n one ", ANSWERS) == "short one"
    presets.save("sampling", "short one", ANSWERS)
    presets.save("prompt", "Another", replace(ANSWERS, system_prompt=""))
    again = Presets(tmp_path / "presets.json")
    assert again.names("prompt") == ["Another", "short one"] and again.names("sampling") == ["short one"]
    assert again.values("prompt", " short  one") == {"system_prompt": "Be brief."}
    assert again.values("sampling", "short one") == {
        "temperature": 0.2, "top_p": 0.95, "top_k": 40, "min_p": 0.0, "repetition_penalty": 1.05,
    }  # fmt: skip
    again.save("prompt", "short one", replace(ANSWERS, system_prompt="Be very brief."))
    again.delete("sampling", "short one")
    last = Presets(tmp_path / "presets.json")
    assert last.values("prompt", "short one") == {"system_prompt": "Be very brief."}
    assert last.values("sampling", "short one") is None and last.names("sampling") == []


def test_what_makes_no_sense_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    presets = Presets(tmp_path / "presets.json")
    for name in ("", " \n", "\x00"):
        with pytest.raises(ConfigError, match="name"):
            presets.save("prompt", name, ANSWERS)
    with pytest.raises(ConfigError, match="no preset"):
        presets.delete("prompt", "absent")
    assert len(presets.save("prompt", "x" * 500, ANSWERS)) == 60
    monkeypatch.setattr("app.presets.MAX_PRESETS", 2)
    presets.save("prompt", "second", ANSWERS)
    with pytest.raises(ConfigError, match="delete one"):
        presets.save("prompt", "third", ANSWERS)
    presets.save("prompt", "second", ANSWERS)  # its own place is free

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"\(No space left on device\): make room there"):
        presets.delete("prompt", "second")
    assert "second" in presets.names("prompt") and MAX_PRESETS == 200


def test_what_is_no_unicode_is_mended_and_kept(tmp_path: Path) -> None:
    presets = Presets(tmp_path / "presets.json")
    assert presets.save("prompt", "a\ud800b", check_answers({"system_prompt": "x\ud800"})) == "a b"
    again = Presets(tmp_path / "presets.json")
    assert (again.report, again.values("prompt", "a b")) == ("", {"system_prompt": "x?"})


def test_what_a_newer_version_has_saved_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "presets.json"
    brief = {"system_prompt": "Be brief.", "colour": "red"}
    path.write_text(
        json.dumps({"schema": 2, "prompt": {"brief": brief, "b": brief}, "sampling": {}, "voices": {"a": 1}})
    )
    presets = Presets(path)
    presets.save("sampling", "warm", ANSWERS)
    presets.delete("prompt", "b")
    data = json.loads(path.read_text())
    assert (data["schema"], data["voices"], data["prompt"]) == (2, {"a": 1}, {"brief": brief})
    assert presets.values("prompt", "brief") == {"system_prompt": "Be brief."} and "warm" in data["sampling"]


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"prompt": {}}', '{"prompt": {}, "sampling": {"a": {"temperature": 1}}}',
        '{"prompt": {"a": {"system_prompt": "%s"}}, "sampling": {}}' % ("x" * (MAX_SYSTEM_PROMPT + 1)),
        '{"prompt": {"": {"system_prompt": "x"}}, "sampling": {}}', '{"prompt": [], "sampling": []}',
        json.dumps({"prompt": {}, "sampling": {"a": dict.fromkeys(FIELDS["sampling"], 10 ** 400)}}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_kept_aside(tmp_path: Path, content: str) -> None:
    path = tmp_path / "presets.json"
    path.write_text(content)
    presets = Presets(path)
    assert presets.names("prompt") == [] and presets.report.startswith("The presets could not be read")
    (kept,) = tmp_path.glob("*.damaged")
    assert kept.read_text() == content and kept.name in presets.report
    assert Presets(path).report == presets.report, "who read it may have been killed before it was said"
    presets.save("prompt", "new", ANSWERS)
    assert json.loads(path.read_text())["prompt"] == {"new": {"system_prompt": "Be brief."}}


def test_two_windows_that_save_at_once_undo_nothing_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets, both = Presets(tmp_path / "presets.json"), threading.Barrier(2)

    def slow(path: Path, value: object) -> None:
        with suppress(threading.BrokenBarrierError):  # the other one waits until this one has written
            both.wait(0.3)
        write_json(path, value)

    monkeypatch.setattr("app.presets.write_json", slow)
    threads = [threading.Thread(target=presets.save, args=("prompt", name, ANSWERS)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert presets.names("prompt") == Presets(tmp_path / "presets.json").names("prompt") == ["a", "b"]
