"""Models are built one at a time: what transformers changes meanwhile is as before when all are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from localmoe.model import skeleton


def test_two_threads_that_build_leave_the_default_dtype_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, left = threading.Semaphore(0), threading.Event()

    class Slow:
        """The first one to build waits for a second one to begin, if it can."""

        first = True

        @classmethod
        def from_config(cls, config: Any, **options: Any) -> Any:
            is_first, cls.first = cls.first, False
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)  # as transformers does
            inside.release()
            if is_first:
                assert inside.acquire(timeout=10)  # its own
                inside.acquire(timeout=0.3)
            else:
                left.wait(10)
            torch.set_default_dtype(before)
            if is_first:
                left.set()
            return AutoModelForCausalLM.from_config(config, **options)

    monkeypatch.setattr(skeleton, "language_model_class", lambda config: Slow)
    config = tiny_config("qwen2_moe")

    def build() -> None:
        skeleton.model_from_config(config, torch.float32, "a model")

    threads = [threading.Thread(target=build) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
