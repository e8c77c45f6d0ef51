"""Prompt files: a JSON object a line, whatever its texts hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localmoe.core.errors import ConfigError
from localmoe.core.prompts import Prompt, read_prompts


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_lines_end_where_json_lines_do(end: str, encoding: str, tmp_path: Path) -> None:
    texts = ["a\u2028b\u2029c\u0085d\x0be", "plain", "\u4f60\u597d"]
    lines = [json.dumps({"id": i, "prompt": text}, ensure_ascii=False) for i, text in enumerate(texts)]
    (tmp_path / "p.jsonl").write_bytes(end.join([*lines, "", " "]).encode(encoding))
    assert read_prompts(tmp_path / "p.jsonl") == [Prompt(i, text) for i, text in enumerate(texts)]
    assert len(read_prompts(tmp_path / "p.jsonl", 2)) == 2


def test_names_of_prompts_stay_what_they_are(tmp_path: Path) -> None:
    names = [7, "7", None, 2.5, ["a", 1], {"set": "b"}, 2**70]
    lines = [json.dumps({"id": name, "prompt": "p"}) for name in names]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    assert [prompt.id for prompt in read_prompts(tmp_path / "p.jsonl")] == names


@pytest.mark.parametrize(
    "line", ["[" * 100_000, "{", '{"id": NaN, "prompt": "b"}', '{"id": 1}', '{"id": 1, "prompt": 2}', "[]"]
)
def test_a_line_that_is_no_prompt_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"id": "a", "prompt": "b"}}\n{line}')
    with pytest.raises(ConfigError, match=r"Line 2 of .*p\.jsonl is no prompt"):
        read_prompts(tmp_path / "p.jsonl")
