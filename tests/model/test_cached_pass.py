"""A pass behind a cache, whatever the model's forward calls its cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from localmoe.model.cached_pass import cached_pass


def deprecating(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers decorates forwards whose arguments were renamed."""

    @functools.wraps(forward)
    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert "past_key_values" not in kwargs, "transformers warns of this, and an error it will be"
        return forward(self, *args, **kwargs)

    return renamed


class Plain:
    def __call__(self, **given: Any) -> Any:
        return self.forward(**given)

    def noted(self, **given: Any) -> Any:
        self.given = given
        return SimpleNamespace(logits=torch.ones(1))


class Before(Plain):
    def forward(self, input_ids: Any = None, past_key_values: Any = None, **rest: Any) -> Any:
        return self.noted(ids=input_ids, cache=past_key_values, **rest)


class Since(Plain):
    @deprecating
    def forward(self, input_ids: Any = None, cache: Any = None, **rest: Any) -> Any:
        return self.noted(ids=input_ids, cache=cache, **rest)


@pytest.mark.parametrize("make", [Before, Since])
def test_the_cache_goes_by_the_name_that_the_forward_has_for_it(make: type[Plain]) -> None:
    model, cache = make(), transformers.DynamicCache()
    ids, positions = torch.tensor([[3, 4]]), torch.tensor([[7, 8]])
    assert cached_pass(model, ids, positions, cache, keep=1).item() == 1
    assert model.given["ids"] is ids and model.given["cache"] is cache
    assert model.given["position_ids"] is positions
    assert model.given["use_cache"] is True and model.given["logits_to_keep"] == 1
    assert set(model.given) == {"ids", "cache", "position_ids", "use_cache", "logits_to_keep"}
