"""Which captured pass serves a window."""

from __future__ import annotations

import pytest
import torch

from localmoe.model.step_graphs import CAPTURE_AT, MAX_GRAPHS, PassOutput, StepGraphs

NOTHING = PassOutput(torch.zeros(1), torch.zeros(1))


class Graph:
    def replay(self) -> None:
        pass


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    made = StepGraphs(enabled=True)
    monkeypatch.setattr(made, "_capture", lambda body: ((Graph(), body()), 0.5))
    return made


def issue(graphs: StepGraphs, *keys: int) -> int:
    """What run() is asked for, as the passes do it."""
    key = graphs.cheapest([key] for key in keys)
    graphs.run(key, lambda: NOTHING)
    return key


def test_a_larger_captured_pass_serves_until_the_fitting_one_is_wanted_often(graphs: StepGraphs) -> None:
    assert issue(graphs, 8, 16, 72) == 8  # nothing is captured yet
    assert issue(graphs, 72) == 72
    found = [issue(graphs, 16, 72) for _ in range(CAPTURE_AT + 1)]
    assert found == [72] * (CAPTURE_AT - 1) + [16, 16]
    assert issue(graphs, 4, 8, 16, 72) == 8  # the smallest that is there
    assert issue(graphs, 6, 8, 16, 72) == 8
    assert issue(graphs, 8, 16, 72) == 8
    graphs.clear()
    assert issue(graphs, 16, 72) == 16 and len(graphs) == 1


def test_one_that_costs_alike_serves_however_often_the_first_is_wanted(graphs: StepGraphs) -> None:
    issue(graphs, 41)
    issue(graphs, 72)
    assert [graphs.cheapest([[40, 41], [72]]) for _ in range(3 * CAPTURE_AT)] == [41] * (3 * CAPTURE_AT)
    issue(graphs, 40)
    assert graphs.cheapest([[40, 41], [72]]) == 40


def test_the_graphs_are_bounded_and_the_longest_unused_goes(graphs: StepGraphs) -> None:
    for key in range(MAX_GRAPHS + 1):
        issue(graphs, key)
        issue(graphs, 0)
    assert len(graphs) == MAX_GRAPHS
    assert graphs.cheapest([[-1], [0]]) == 0 and issue(graphs, 1, 2) == 2  # 0 is there, 1 went


def test_without_graphs_every_pass_is_the_fitting_one() -> None:
    graphs = StepGraphs(enabled=False)
    assert [graphs.cheapest([[8], [72]]) for _ in range(3)] == [8, 8, 8]


def test_what_is_captured_ahead_is_there_and_makes_room_among_the_others(graphs: StepGraphs) -> None:
    for key in range(MAX_GRAPHS):
        issue(graphs, key)
    wanted, captured = [100, 3, 101, 0], []

    def body(key: int) -> PassOutput:
        captured.append(key)
        return NOTHING

    assert [graphs.capture_ahead(wanted, body) for _ in range(3)] == [True, True, False]
    assert captured == [100, 101] and len(graphs) == MAX_GRAPHS
    for key in wanted:
        graphs.run(key, pytest.fail)
    assert graphs.capture_s == 0.5 * MAX_GRAPHS, "answers waited for the first ones"
    assert all(graphs.cheapest([[-1], [gone]]) == -1 for gone in (1, 2)), "unused for longest, not expected"


def test_without_graphs_nothing_is_captured_ahead() -> None:
    assert not StepGraphs(enabled=False).capture_ahead([1], pytest.fail)
