"""Which settings run for which table, and how much memory they are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from handmade import PAPER_SHAPE, SUBJECT

from localmoe.core.errors import ConfigError
from localmoe.core.prompts import read_prompts
from localmoe.tables.cells import LEVELS, subject_from
from localmoe.tables.datasets import DATASETS, FOLDER, check_datasets, requests
from localmoe.tables.registry import TABLES, check_tables
from localmoe.tables.spmoe_fig14 import cutoffs


def test_budgets_are_the_papers_for_its_shape_and_as_far_between_one_token_and_all_for_others() -> None:
    assert [PAPER_SHAPE.slots_a_layer(level) for level in LEVELS] == [6, 16, 32]
    assert [PAPER_SHAPE.slots(level) for level in LEVELS] == [26 * n for n in (6, 16, 32)]
    # a draft of a quarter of the experts' bytes is worth 16 slots a layer: the paper's scaled LRU
    assert [PAPER_SHAPE.slots_without_draft(level) for level in LEVELS] == [26 * n for n in (22, 32, 48)]
    assert [SUBJECT.slots_a_layer(level) for level in LEVELS] == [4, 6, 9]  # 4 + 12 x 10/58, 26/58
    assert SUBJECT.slots_without_draft("high") == 54 + 12


def test_no_two_settings_of_a_table_share_a_name_and_tables_share_settings() -> None:
    for subject in (SUBJECT, PAPER_SHAPE):
        all_cells = [cell for table in TABLES.values() for cell in table.cells(subject)]
        assert len({cell.key for cell in all_cells}) == len(set(all_cells)) < len(all_cells)
    assert {cell.policy for cell in TABLES["sp3"].cells(SUBJECT)} == {
        "on-demand", "moe-infinity", "adapmoe", "sp-moe", "moe-speq"
    }  # fmt: skip
    assert TABLES["fig6"].cells(PAPER_SHAPE) == [], "simulated routing says nothing of fidelity"


def test_cutoffs_reach_from_none_to_all() -> None:
    assert cutoffs(6) == [0, 1, 2, 3, 4, 5, 6] and cutoffs(1) == [0, 1]
    assert cutoffs(26)[0] == 0 and cutoffs(26)[-1] == 26 and len(cutoffs(26)) == 8


def test_a_subject_survives_its_file() -> None:
    for subject in (SUBJECT, PAPER_SHAPE):
        assert subject_from(subject.as_dict()) == subject


def test_unknown_names_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no table 'fig99': choose from 2, 3, 4, fig6"):
        check_tables(["3", "fig99"])
    with pytest.raises(ConfigError, match="no dataset 'gpqa': choose from humaneval"):
        check_datasets(["gpqa"])
    assert check_tables(["4", "3", "4"]) == ("4", "3") and check_datasets(["c4", "c4"]) == ("c4",)


def test_prompts_are_whole_distinct_named_in_the_readme_and_small() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 400_000
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == set(DATASETS)
    for name in DATASETS:
        prompts = read_prompts(FOLDER / f"{name}.jsonl")
        assert len({prompt.text for prompt in prompts}) == len({prompt.id for prompt in prompts}) == 40
        assert f"`{name}.jsonl`" in readme
    lines = (
        (Path(__file__).parents[2] / "assets/calibration/multi_domain.jsonl").read_text("utf-8").splitlines()
    )
    calibration = "\n".join(json.loads(line)["text"] for line in lines)
    for name in DATASETS:
        for prompt in read_prompts(FOLDER / f"{name}.jsonl"):
            assert prompt.text[20:120] not in calibration


def test_questions_are_asked_and_texts_are_continued() -> None:
    names = tuple(DATASETS)
    mixed = requests("mixed", names, 5, 7)
    assert len(mixed) == 10 and all(request.max_new_tokens == 7 for request in mixed)
    assert [request.prompt is not None for request in mixed] == [False] * 6 + [True] * 4
    assert requests("mixed", names, 1, 7) == mixed[::2]
    assert requests("c4", names, 2, 7) == mixed[-2:]
