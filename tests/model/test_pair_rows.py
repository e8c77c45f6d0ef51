"""Rows of a layer's tokens by expert, against a loop over tokens."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from localmoe.model.pair_rows import pair_rows, rows_by_expert

EXPERTS, TOP_K = 5, 3


@given(
    st.lists(
        st.permutations(range(-1, EXPERTS + 1)).map(lambda order: order[:TOP_K]), min_size=1, max_size=9
    ),
    st.sampled_from([1, 2, 16]),
)
def test_each_expert_gets_the_rows_that_chose_it_padded_by_some_of_them(
    chosen: list[list[int]], multiple: int
) -> None:
    found = pair_rows(rows_by_expert(chosen, EXPERTS), TOP_K, torch.device("cpu"), multiple)
    pairs = {
        expert: [(token, row.index(expert)) for token, row in enumerate(chosen) if expert in row]
        for expert in range(EXPERTS)
    }
    assert found.keys() == {expert for expert, wanted in pairs.items() if wanted}, "others are nobody's"
    for expert, rows in found.items():
        wanted = pairs[expert]
        assert rows.places.tolist() == [token * TOP_K + k for token, k in wanted]
        tokens = rows.tokens.tolist()
        assert tokens[: len(wanted)] == [token for token, _ in wanted]
        assert len(tokens) % multiple == 0 and len(tokens) - len(wanted) < multiple
        assert set(tokens[len(wanted) :]) <= set(tokens[: len(wanted)])
