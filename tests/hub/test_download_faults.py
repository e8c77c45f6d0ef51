"""Downloads over a bad network: whatever is cut, refused or changed on the way, the files are the Hub's."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hub_server
from support.hub_home import NEEDED, QUICK, REPO, hub_and_home, small_model, weights
from support.hub_server import Fault, HubServer

from localmoe.core.errors import DownloadError
from localmoe.core.types import Progress
from localmoe.hub.download_record import DownloadRecord
from localmoe.hub.downloads import DownloadOptions, download_model
from localmoe.hub.http_files import Patience
from localmoe.hub.part_file import PartFile

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FILES = small_model(50_000)
SIZE = len(FILES[FIRST])


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_and_home(tmp_path) as server:
        server.commit(REPO, FILES)
        yield server


def is_whole(folder: Path, files: dict[str, bytes] = FILES) -> bool:
    return all((folder / name).read_bytes() == files[name] for name in NEEDED)


def details(hub: HubServer, options: DownloadOptions = QUICK) -> list[str]:
    """What the progress of a download that works says beside its numbers."""
    reports: list[Progress] = []
    assert is_whole(download_model(REPO, progress=reports.append, options=options))
    assert reports[-1].done == reports[-1].total and reports[-1].seconds_left == 0.0
    return [report.detail for report in reports]


@settings(max_examples=12)
@given(
    cuts=st.lists(st.integers(0, SIZE - 1), max_size=4),
    others=st.lists(
        st.sampled_from([Fault(status=503), Fault(ignore_range=True), Fault(shift=3)]), max_size=2
    ),
    order=st.randoms(use_true_random=False),
)
def test_wherever_the_connection_is_cut_the_files_are_the_hub_s(
    cuts: list[int], others: list[Fault], order: object
) -> None:
    faults = [*(Fault(cut_after=cut) for cut in cuts), *others]
    order.shuffle(faults)  # type: ignore[attr-defined]
    patient = replace(QUICK, patience=replace(QUICK.patience, attempts=9, longest_wait_s=0.01))
    with tempfile.TemporaryDirectory() as home, hub_and_home(Path(home)) as hub:
        hub.commit(REPO, FILES)
        hub.fail(FIRST, *faults)
        assert is_whole(download_model(REPO, options=patient))


def test_after_a_cut_only_the_rest_is_sent(hub: HubServer) -> None:
    hub.fail(FIRST, Fault(cut_after=70_000), Fault(cut_after=0), Fault(cut_after=60_000))
    assert is_whole(download_model(REPO, options=QUICK))
    starts = [one.start for one in hub.requests if one.path.endswith(FIRST) and one.server == "cdn"]
    assert starts == [None, 70_000, 70_000, 130_000]
    assert sum(one.sent for one in hub.bodies(FIRST)) == SIZE


def test_an_answer_that_ends_early_without_a_word_is_gone_on_with(hub: HubServer) -> None:
    hub.fail(FIRST, Fault(cut_after=70_000, no_length=True))
    assert is_whole(download_model(REPO, options=QUICK))
    assert [one.start for one in hub.bodies(FIRST)] == [None, 70_000]


def test_any_number_of_cuts_is_borne_as_long_as_bytes_arrive(hub: HubServer) -> None:
    hub.fail(FIRST, *[Fault(cut_after=20_000)] * 9)
    assert is_whole(download_model(REPO, options=QUICK))


def test_a_busy_hub_is_asked_again_and_the_progress_says_so(hub: HubServer) -> None:
    slower = replace(QUICK, patience=Patience(4, 0.2, 0.3, 5.0))
    hub.fail(FIRST, Fault(status=429, headers={"Retry-After": "100"}), Fault(status=502))
    texts = details(hub, slower)
    assert any("the server answered 429, trying again in 0 s" in text for text in texts)
    assert any("502" in text for text in texts) and "502" not in texts[-1]


def test_a_busy_api_is_asked_again_a_few_times(hub: HubServer) -> None:
    hub.api_faults.extend([503, 429, 500])
    assert any("503" in text for text in details(hub, replace(QUICK, patience=Patience(4, 0.3, 0.3, 5.0))))
    hub.api_faults.extend([503] * 4)
    with pytest.raises(DownloadError, match=r"Asking the Hub.*4 times in a row.*503"):
        download_model(REPO, options=QUICK)


@pytest.mark.parametrize(
    "answer",
    ["<html>Log in to this network first.</html>", "", "[]", "{}", "[" * 100_000, '{"id": "org/moe", "sha',
     '{"id": "org/moe", "siblings": [{}]}', '{"id": "org/moe", "siblings": [], "lastModified": "yesterday"}'],
)  # fmt: skip
@pytest.mark.slow(but=4)
def test_an_answer_of_the_api_that_makes_no_sense_is_asked_for_again(hub: HubServer, answer: str) -> None:
    hub.api_faults.extend([answer.encode()] * 3)
    assert is_whole(download_model(REPO, options=QUICK))
    hub.api_faults.extend([answer.encode()] * 4)
    with pytest.raises(
        DownloadError, match=r"4 times in a row \(the answer makes no sense\): check the conn"
    ):
        download_model(REPO, options=QUICK)


def test_what_a_server_asks_to_wait_is_bounded() -> None:
    patience = Patience(first_wait_s=1.0, longest_wait_s=10.0)
    assert patience.wait_s(1, 3.0) == 3.0 and patience.wait_s(1, 3600.0) == 10.0
    for failures in range(1, 9):
        longest = min(10.0, 2.0 ** (failures - 1))
        assert all(longest / 2 <= patience.wait_s(failures, None) <= longest for _ in range(20))


def test_a_connection_that_stays_silent_counts_as_lost(hub: HubServer) -> None:
    silence = threading.Event()
    hub.on_file = lambda name: silence.wait(5) if name == FIRST else None
    impatient = replace(QUICK, patience=Patience(2, 0.01, 0.01, 0.2))
    with pytest.raises(DownloadError, match=r"2 times in a row \(connection lost \(ReadTimeout\)\)"):
        download_model(REPO, options=impatient)
    silence.set()


def test_a_connection_that_is_always_lost_is_given_up_and_what_arrived_is_kept(hub: HubServer) -> None:
    hub.fail(FIRST, Fault(cut_after=100_000), *[Fault(cut_after=0)] * 4)
    with pytest.raises(DownloadError, match=f"{FIRST} of org/moe failed 4 times in a row.*kept"):
        download_model(REPO, options=QUICK)
    hub.requests.clear()
    hub.faults.clear()
    assert is_whole(download_model(REPO, options=QUICK))
    assert [one.start for one in hub.bodies(FIRST)] == [100_000]


def test_a_server_that_always_begins_anew_and_never_ends_is_given_up(hub: HubServer) -> None:
    hub.fail(FIRST, *[Fault(cut_after=100_000, ignore_range=True)] * 20)
    with pytest.raises(DownloadError, match="4 times in a row"):
        download_model(REPO, options=QUICK)
    assert len(hub.bodies(FIRST)) == 4


@pytest.mark.parametrize("at", [0, SIZE // 2, SIZE - 1])
def test_a_byte_that_arrives_changed_costs_the_file_and_it_is_fetched_again(hub: HubServer, at: int) -> None:
    hub.fail(FIRST, Fault(flip_at=at), Fault(flip_at=at))
    assert is_whole(download_model(REPO, options=QUICK))
    assert sum(one.sent for one in hub.bodies(FIRST)) == 3 * SIZE


def test_a_small_file_s_checksum_is_compared_too(hub: HubServer) -> None:
    hub.fail("chat_template.jinja", Fault(flip_at=3))
    assert is_whole(download_model(REPO, options=QUICK))
    assert len(hub.bodies("chat_template.jinja")) == 2


def test_what_the_plan_is_made_of_is_checked_too(hub: HubServer) -> None:
    hub.fail("config.json", Fault(flip_at=FILES["config.json"].index(b"num")))  # would be a dense model
    assert is_whole(download_model(REPO, options=QUICK))


def test_a_file_that_is_always_wrong_is_given_up_and_not_kept(hub: HubServer, tmp_path: Path) -> None:
    hub.fail(FIRST, *[Fault(flip_at=9)] * 3)
    with pytest.raises(DownloadError, match=r"3 times with a wrong checksum"):
        download_model(REPO, options=QUICK)
    left = [path.name for path in (tmp_path / "models" / ".org--moe.download").iterdir()]
    assert not [name for name in left if name.startswith(FIRST)] and len(hub.bodies(FIRST)) == 3


def test_bytes_that_rot_on_the_disk_between_two_runs_are_noticed(hub: HubServer, tmp_path: Path) -> None:
    hub.fail(FIRST, Fault(cut_after=100_000), *[Fault(cut_after=0)] * 4)
    with pytest.raises(DownloadError):
        download_model(REPO, options=QUICK)
    hub.faults.clear()
    (part,) = (tmp_path / "models" / ".org--moe.download").glob(f"{FIRST}.*.part")
    part.write_bytes(b"\0" * 100_000)
    assert is_whole(download_model(REPO, options=QUICK))


def test_a_link_that_expired_is_asked_for_again(hub: HubServer) -> None:
    hub.fail(FIRST, Fault(cut_after=100_000), Fault(status=403))
    assert is_whole(download_model(REPO, options=QUICK))


@pytest.mark.parametrize("name", [FIRST, "config.json"])
def test_a_file_that_the_link_s_server_does_not_find_is_asked_for_again(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(hub_server, "is_large", lambda _: True)  # the plan's files come through links too
    hub.commit(REPO, FILES)
    hub.fail(name, Fault(status=404), Fault(status=410), Fault(status=404))
    assert is_whole(download_model(REPO, options=QUICK))
    assert len([one for one in hub.requests if "/api/" in one.path]) == 1, "the plan stays"


def test_a_file_that_the_hub_itself_says_is_gone_is_not_waited_for(hub: HubServer) -> None:
    gone = Fault(status=404, headers={"X-Error-Code": "EntryNotFound"})  # of a renamed repo, after a redirect
    hub.fail(FIRST, *[gone] * 9)
    with pytest.raises(DownloadError, match=r"than it lists \(404 Client Error, in 3 tries\)"):
        download_model(REPO, options=QUICK)


@pytest.mark.parametrize("status", [400, 405, 409, 412, 451])
def test_a_refusal_does_not_print_what_opens_the_link(hub: HubServer, status: int) -> None:
    hub.fail(FIRST, Fault(status=status))
    with pytest.raises(DownloadError, match=f"refused org/moe with status {status}") as refusal:
        download_model(REPO, options=QUICK)
    assert "signature" not in str(refusal.value)


def test_a_hub_whose_list_and_files_agree_at_the_third_look_is_borne(hub: HubServer) -> None:
    asked: list[str] = []

    def lag(name: str) -> None:
        if name == FIRST:
            asked.append(name)
            hub.instead = {FIRST: weights(50_000, "a", 7)} if len(asked) < 3 else {}

    hub.on_file = lag
    assert is_whole(download_model(REPO, options=QUICK))
    assert len(asked) == 3


def test_access_that_is_taken_away_meanwhile_is_one_sentence(hub: HubServer) -> None:
    def close_it(name: str) -> None:
        hub.repos[REPO].gated = name != "config.json" and "index" not in name

    hub.on_file = close_it
    with pytest.raises(DownloadError, match="org/moe is gated"):
        download_model(REPO, options=QUICK)


def test_a_commit_that_replaces_the_planned_one_meanwhile_starts_only_changed_files_anew(
    hub: HubServer,
) -> None:
    hub.fail(FIRST, Fault(cut_after=100_000), *[Fault(cut_after=0)] * 4)
    with pytest.raises(DownloadError):
        download_model(REPO, options=QUICK)
    hub.faults.clear()
    changed = {**FILES, FIRST: small_model(49_000)[FIRST]}
    sent = sum(one.sent for one in hub.bodies(SECOND))

    def change(name: str) -> None:
        if name == FIRST and len(hub.repos[REPO].commits) == 1:  # in the middle of the second download
            hub.repos[REPO].commits.clear()
            hub.commit(REPO, changed)

    hub.on_file = change
    folder = download_model(REPO, options=QUICK)
    assert is_whole(folder, changed)
    assert DownloadRecord.read(folder) == DownloadRecord(REPO, list(hub.repos[REPO].commits)[-1])
    assert sum(one.sent for one in hub.bodies(SECOND)) == max(sent, len(FILES[SECOND]))
    sent_first = [(one.start, one.sent) for one in hub.bodies(FIRST) if one.server == "cdn"]
    assert sent_first == [(None, 100_000), (None, len(changed[FIRST]))]


@pytest.mark.parametrize(
    ("other", "etags"), [(weights(50_000, "a", 7), True), (weights(49_000, "a", 1), False)]
)
def test_a_hub_that_serves_other_files_than_it_lists_is_given_up_before_they_are_fetched(
    hub: HubServer, other: bytes, etags: bool
) -> None:
    hub.etags, hub.instead = etags, {FIRST: other}
    with pytest.raises(DownloadError, match=r"serves other files .* than it lists"):
        download_model(REPO, options=QUICK)


def test_a_part_that_was_not_asked_for_is_not_put_into_the_file(hub: HubServer) -> None:
    hub.fail(FIRST, Fault(cut_after=70_000), Fault(shift=3), Fault(flip_at=0))
    assert is_whole(download_model(REPO, options=QUICK))
    starts = [one.start for one in hub.requests if one.path.endswith(FIRST) and one.server == "cdn"]
    assert starts == [None, 70_000, None, None]


def test_a_full_disk_is_one_sentence_and_what_arrived_is_kept(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = PartFile.append

    def full(part: PartFile, data: bytes) -> None:
        if part.file.name == FIRST and part.size > 60_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(part, data)

    monkeypatch.setattr(PartFile, "append", full)
    with pytest.raises(DownloadError, match=r"No space left.*kept: free some disk space and pull again"):
        download_model(REPO, options=QUICK)
    (part,) = (tmp_path / "models" / ".org--moe.download").glob(f"{FIRST}.*.part")
    assert part.stat().st_size > 60_000


def test_files_that_are_no_model_are_said_to_be_the_hub_s(hub: HubServer, tmp_path: Path) -> None:
    index = {"weight_map": {"a": FIRST, "b": SECOND, "c": SECOND}}
    hub.commit(REPO, {**FILES, "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(DownloadError, match=r"as the Hub has it.*'?c'?"):
        download_model(REPO, options=QUICK)
    assert not (tmp_path / "models" / "org--moe").exists()


def starts(hub: HubServer) -> list[int | None]:
    """Where each request for the first file's bytes began."""
    return [one.start for one in hub.requests if one.path.endswith(FIRST) and one.server == "cdn"]


@pytest.mark.parametrize("times", [1, 3])
def test_a_network_s_own_page_does_not_cost_what_has_arrived(
    hub: HubServer, tmp_path: Path, times: int
) -> None:
    """Which it sends with status 200."""
    hub.fail(FIRST, Fault(cut_after=150_000), *[Fault(status=200)] * times)
    if times == 1:
        assert is_whole(download_model(REPO, options=QUICK))
    else:
        with pytest.raises(DownloadError):
            download_model(REPO, options=QUICK)
        (part,) = tmp_path.glob(f"models/.*/{FIRST}*.part")
        assert part.stat().st_size >= 150_000
        assert is_whole(download_model(REPO, options=QUICK))
    assert starts(hub) == [None, *[150_000] * (times + 1)]


def test_the_rest_of_a_file_may_come_without_its_whole_length(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = hub_server._Handler._answer

    def without(
        self: Any, status: int, body: bytes, headers: dict[str, str], *more: Any, **options: Any
    ) -> Any:
        if "Content-Range" in headers:
            headers = {**headers, "Content-Range": headers["Content-Range"].rsplit("/", 1)[0] + "/*"}
        return answer(self, status, body, headers, *more, **options)

    monkeypatch.setattr(hub_server._Handler, "_answer", without)
    hub.fail(FIRST, Fault(cut_after=150_000))
    assert is_whole(download_model(REPO, options=QUICK)) and starts(hub) == [None, 150_000]
