"""What earlier runs measured of a draft: kept whole, bounded, and used by the next start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engines import ask, load_with_slots

from localmoe.core.remembered import MAX_ENTRIES
from localmoe.engine import Engine
from localmoe.engine.draft_memory import FILE, Rates, recall, remember
from localmoe.engine.draft_place import DraftPlace

Tiny = Callable[[str], tuple[Path, Any]]
PROMPT = "Hello there, how are"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_last_measurement_of_each_situation_is_kept(home: Path) -> None:
    assert recall("a card; 20 % in slots") is None
    remember("a card; 20 % in slots", Rates(99.5, 141.0))
    remember("another", Rates(20.0, 10.0))
    remember("a card; 20 % in slots", Rates(101.0, 140.0))
    assert recall("a card; 20 % in slots") == Rates(101.0, 140.0) and recall("another") == Rates(20.0, 10.0)
    assert [path.name for path in home.iterdir()] == [FILE.file_name]


def test_the_oldest_go_first(home: Path) -> None:
    for number in range(MAX_ENTRIES + 3):
        remember(str(number), Rates(1.0, 2.0))
    assert recall("2") is None and recall("3") == Rates(1.0, 2.0) and recall(str(MAX_ENTRIES + 2)) is not None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=60),
        st.sampled_from(["[]", "{}", '{"format": 1}', "null", "[1", "[" * 100_000]).map(str.encode),
        st.sampled_from(
            [
                "null",
                "[]",
                "[1]",
                "[1, 0]",
                "[1, NaN]",
                "[1, Infinity]",
                f"[1, {10**400}]",
                '["a", 2]',
                "[true, 2]",
            ]
        ).map(lambda pair: f'{{"format": "{FILE.form}", "tokens_per_s": {{"x": {pair}}}}}'.encode()),
        st.just(f'{{"format": "{FILE.form}", "tokens_per_s": 3}}'.encode()),
    )
)
def test_a_file_that_makes_no_sense_is_as_none(home: Path, data: bytes) -> None:
    home.mkdir(exist_ok=True)
    (home / FILE.file_name).write_bytes(data)
    assert recall("x") is None
    remember("x", Rates(3.0, 4.0))
    assert recall("x") == Rates(3.0, 4.0)


def test_a_home_that_cannot_be_written_to_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "file" / "home"))
    remember("x", Rates(3.0, 4.0))
    assert recall("x") is None


def loaded(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(DraftPlace, "_describe_situation", lambda self: f"here, {self._slots} slots")
    return load_with_slots(tiny("qwen2_moe")[0], 8)


def test_a_start_goes_by_what_the_last_one_measured(
    tiny: Tiny, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(tiny, monkeypatch) as engine:
        tokens = ask(engine, PROMPT, 6).tokens
        assert not engine.plan.draft_aside
        worth = engine._draft_place._worth
        worth.drafted_per_s, worth.plain_per_s, worth.judged = 50.0, 100.0, True
    assert recall("here, 8 slots") == Rates(50.0, 100.0)
    with loaded(tiny, monkeypatch) as engine:
        assert ask(engine, PROMPT, 6).tokens == tokens and engine.plan.draft_aside
        worth = engine._draft_place._worth
        worth.plain_per_s, worth.judged = 30.0, True
        ask(engine, PROMPT, 4)
        assert not engine.plan.draft_aside
    with loaded(tiny, monkeypatch) as engine:
        ask(engine, PROMPT, 4)
        assert not engine.plan.draft_aside and engine._draft_place.rates.startswith("30 tokens/s without it")


def test_small_changes_are_not_written(tiny: Tiny, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember("here, 8 slots", Rates(50.0, 45.0))
    with loaded(tiny, monkeypatch) as engine:
        ask(engine, PROMPT, 2)
        worth = engine._draft_place._worth
        for drafted, kept in ((54.0, 50.0), (46.0, 50.0), (60.0, 60.0)):
            worth.drafted_per_s = drafted
            ask(engine, PROMPT, 2)
            found = recall("here, 8 slots")
            assert found is not None and found.drafted_per_s == kept


def test_on_a_cpu_nothing_is_remembered(tiny: Tiny, home: Path) -> None:
    with load_with_slots(tiny("qwen2_moe")[0], 8) as engine:
        ask(engine, PROMPT, 2)
        engine._draft_place._worth.drafted_per_s = engine._draft_place._worth.plain_per_s = 50.0
        ask(engine, PROMPT, 2)
    assert not (home / FILE.file_name).exists()
