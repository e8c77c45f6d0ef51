"""An answer that goes on: behind the thoughts that a client has of it, and never as thoughts itself."""

from __future__ import annotations

from typing import Any

import pytest
from small_tokenizers import byte_level, channels, special_thoughts, thinking_marks

from localmoe.chat.begun_answer import begun_text
from localmoe.core.types import Message

BEGUN = Message("assistant", "The best is (", thoughts="Which?")
BARE = Message("assistant", "The best is (")
MARKED = ("<|channel>", "<channel|>")  # Gemma 4's, with a label behind the first


@pytest.mark.parametrize(
    ("tokenizer", "opening", "thoughtful", "bare"),
    [
        (thinking_marks(None), "A\n", "<think>\nWhich?\n</think>\n\n", ""),
        (thinking_marks(False), "A", "<think>\nWhich?\n</think>\n\n", ""),
        (thinking_marks(None), "A<think>\n", "Which?\n</think>\n\n", "\n</think>\n\n"),
        (thinking_marks(None), "A<think>", "Which?\n</think>\n\n", "\n</think>\n\n"),
        (thinking_marks(None), "A<think>\n\n</think>\n\n", "", ""),
        (thinking_marks(None), "A</think>", "", ""),
        (byte_level(), "A\n", "", ""),  # of no thoughts
        (thinking_marks(True), "A<think>", "Which?</think>", "</think>"),
        (thinking_marks(True), "A", "<think>Which?</think>", ""),
        (special_thoughts(*MARKED), "A", "<|channel>thought\nWhich?<channel|>", ""),
        (special_thoughts(*MARKED), "A<|channel>thought\n<channel|>", "", ""),
        (special_thoughts(*MARKED), "A<|channel>thought\n", "Which?<channel|>", "<channel|>"),
        (channels(), "<|start|>assistant",
         "<|channel|>analysis<|message|>Which?<|end|><|start|>assistant<|channel|>final<|message|>",
         "<|channel|>final<|message|>"),
    ],
)  # fmt: skip
def test_an_answer_goes_on_behind_its_thoughts_and_outside_of_any(
    tokenizer: Any, opening: str, thoughtful: str, bare: str
) -> None:
    assert begun_text(tokenizer, opening, BEGUN) == f"{opening}{thoughtful}The best is ("
    assert begun_text(tokenizer, opening, BARE) == f"{opening}{bare}The best is ("


@pytest.mark.parametrize("space", ["", "\n"])
def test_thoughts_that_were_cut_go_on_behind_the_tag_that_the_template_writes(space: str) -> None:
    cut = Message("assistant", f"{space}<think>Whi")
    assert begun_text(thinking_marks(None), "A<think>\n", cut) == "A<think>\nWhi"
