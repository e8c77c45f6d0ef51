"""What a model's card says of it."""

from __future__ import annotations

from dataclasses import replace

from hardware.example_models import QWEN

from app.models_html import size_facts
from app.texts import Texts


def test_a_model_of_which_the_text_part_runs_says_so() -> None:
    for language, words in (("en", "text only"), ("zh", "仅文本")):
        t = Texts(language)
        assert words not in size_facts(QWEN, 1 << 30, "mit", t)
        assert f" · {words} · mit" in size_facts(replace(QWEN, text_alone=True), 1 << 30, "mit", t)
