"""The parts of a download by themselves: choice of files, the growing file, the meter, the lock."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hub_server import digest_of

from localmoe.core.errors import DownloadError
from localmoe.hub.download_folder import DownloadFolder
from localmoe.hub.download_lock import download_lock
from localmoe.hub.download_plan import choose_files
from localmoe.hub.part_file import PartFile
from localmoe.hub.process_marks import is_running, own_mark
from localmoe.hub.remote_files import RemoteFile, RemoteSnapshot
from localmoe.hub.transfer_meter import WINDOW_S, TransferMeter
from localmoe.hub.unfinished import PENDING_FILE

DATA = st.binary(max_size=300)


def remote(name: str, data: bytes) -> RemoteFile:
    digest = digest_of(name, data)
    return RemoteFile(name, len(data), digest, "sha256" if len(digest) == 64 else "git")


def snapshot(*names: str) -> RemoteSnapshot:
    return RemoteSnapshot("org/moe", "c" * 40, tuple(remote(name, name.encode()) for name in names))


@pytest.mark.parametrize(
    ("listed", "index", "expected"),
    [
        (["config.json", "model.safetensors"], None, ["config.json", "model.safetensors"]),
        (["model.safetensors", "model-00001-of-00001.safetensors"], None, ["model.safetensors"]),
        (["a.safetensors", "consolidated.safetensors", "x/b.safetensors"], None, ["a.safetensors"]),
        (["a.safetensors", "b.safetensors"], {"weight_map": {"t": "b.safetensors"}}, ["b.safetensors"]),
        (["a.safetensors", "model.onnx", "a.gguf", "pytorch_model.bin", "x.pth", ".safetensors"], None,
         ["a.safetensors"]),
        (["a.safetensors", "merges.txt", "vocab.json", "train.txt", "config.py", "tokenizer.model"], None,
         ["a.safetensors", "merges.txt", "tokenizer.model", "vocab.json"]),
    ],
)  # fmt: skip
def test_only_what_loading_reads_is_chosen(
    listed: list[str], index: dict[str, object] | None, expected: list[str]
) -> None:
    assert sorted(file.name for file in choose_files(snapshot(*listed), index)) == expected


@given(st.text(max_size=12))
def test_a_plain_name_stays_in_its_folder(name: str) -> None:
    if remote(name, b"").is_plain:
        assert Path(name).name == name and not name.startswith(".") and name.isascii()


@pytest.mark.parametrize("name", ["../y.safetensors", "x/y.safetensors", "a.bin", ".y.safetensors"])
def test_an_index_leads_to_no_file_but_plain_weights_of_the_repo(name: str) -> None:
    with pytest.raises(DownloadError, match="no weight file"):
        choose_files(snapshot(name, "a.safetensors"), {"weight_map": {"t": name}})


def test_small_files_come_first_so_that_a_refusal_comes_early() -> None:
    names = ["model.safetensors", "tokenizer.json", "config.json"]
    chosen = [file.name for file in choose_files(snapshot(*names), None)]
    assert chosen == ["config.json", "tokenizer.json", "model.safetensors"]


@given(data=DATA, pieces=st.lists(st.integers(0, 80)), kill_after=st.integers(0, 6), large=st.booleans())
def test_a_file_that_grows_over_two_runs_is_right_exactly_when_its_bytes_are(
    data: bytes, pieces: list[int], kill_after: int, large: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part"
        file = remote("a.bin" if large else "a.txt", data)
        part, position = PartFile(file, path), 0
        for i, num in enumerate(pieces):
            if i == kill_after:  # the first run ends without a word
                part.close()
                part = PartFile(file, path)
                part.hash_present()
                assert part.size == position
            part.append(data[position : position + num])
            position = min(position + num, len(data))
        assert part.is_right == (position == len(data))
        part.append(data[position:])
        assert part.is_right
        part.sync()
        assert path.read_bytes() == data
        part.restart()
        assert not path.exists() and part.is_right == (not data)


@given(data=st.binary(min_size=1, max_size=50), at=st.integers(0, 49))
def test_one_changed_byte_makes_a_file_wrong(data: bytes, at: int) -> None:
    at %= len(data)
    with tempfile.TemporaryDirectory() as folder:
        part = PartFile(remote("a.bin", data), Path(folder) / "part")
        part.append(data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :])
        assert part.size == len(data) and not part.is_right
        part.close()


def test_a_part_longer_than_the_file_is_thrown_away(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"12345")
    part = PartFile(remote("a.bin", b"1234"), tmp_path / "part")
    part.hash_present()
    assert part.size == 0 and not (tmp_path / "part").exists()


def test_throwing_a_part_away_leaves_the_file_that_it_is_a_link_of(tmp_path: Path) -> None:
    (tmp_path / "in-place").write_bytes(b"1234")
    os.link(tmp_path / "in-place", tmp_path / "part")
    part = PartFile(remote("a.bin", b"5678"), tmp_path / "part")
    part.hash_present()
    part.restart()
    part.append(b"5678")
    part.close()
    assert (tmp_path / "in-place").read_bytes() == b"1234"


def test_the_rate_is_that_of_the_last_seconds_and_falls_to_zero_when_nothing_comes() -> None:
    now = [100.0]
    meter = TransferMeter(1_000_000, clock=lambda: now[0])
    meter.hold("old", 400_000)  # of an earlier run: held, but not received now
    for i in range(1, 101):
        now[0] += 0.1
        meter.receive(1000)
        meter.hold("new", 1000 * i)
        report = meter.report()
    assert (report.done, report.total, report.unit) == (500_000, 1_000_000, "bytes")
    assert report.seconds_left == pytest.approx(50.0) and report.detail == "10.0 kB/s"
    meter.note("new", "waiting")
    for _ in range(int(10 * WINDOW_S) + 1):
        now[0] += 0.1
        report = meter.report()
    assert report.detail == "0.0 B/s; waiting" and report.seconds_left is None


def test_what_runs_is_told_from_what_has_its_number() -> None:
    pid, start = map(int, own_mark().split("-"))
    assert pid == os.getpid() and is_running(pid, start) and not is_running(pid, start - 60_000)
    done = subprocess.Popen(
        [sys.executable, "-c", "print(input())"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process = psutil.Process(done.pid)
    started = int(process.create_time() * 1000)
    assert is_running(done.pid, started)
    assert done.stdin is not None
    done.stdin.close()
    while os.name != "nt" and process.status() != psutil.STATUS_ZOMBIE:  # ended, and nobody asked how
        time.sleep(0.01)
    assert os.name == "nt" or not is_running(done.pid, started)
    done.wait()
    assert not is_running(done.pid, started)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel keeps the time of a start")
def test_a_process_is_known_by_its_mark_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pid, start = map(int, own_mark().split("-"))
    boot_time = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time - 3600.0)
    monkeypatch.setattr("psutil._pslinux.BOOT_TIME", None, raising=False)
    assert is_running(pid, start) and own_mark() == f"{pid}-{start}"


HOLD = """
import sys, time
from pathlib import Path
from localmoe.core.errors import DownloadError
from localmoe.hub.download_lock import download_lock
while time.time() < float(sys.argv[2]):
    pass
try:
    with download_lock(Path(sys.argv[1]), "m", "org/m"):
        print("held", flush=True)
        time.sleep(1.5)
except DownloadError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
def test_of_processes_that_start_together_one_holds_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), str(time.time() + 1.5)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=30)[0].strip() for process in running]
    assert said.count("held") == 1, said
    holder = running[said.index("held")].pid
    assert all(f"by process {holder}" in text for text in said if text != "held")
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline().strip() == "held"
    for name in ("m", "M"):  # one folder, on disks that ignore case
        with pytest.raises(DownloadError, match=str(process.pid)), download_lock(tmp_path, name, "org/m"):
            pass
    process.kill()
    process.communicate()
    with download_lock(tmp_path, "m", "org/m"):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_publication_that_was_cut_short_is_hashed_again_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    folder, file = DownloadFolder("org/moe"), remote("a.bin", b"1234")
    folder.prepare([file])
    (folder.path / "a.bin").write_bytes(b"4321")  # named, of the right size, and perhaps not of this commit
    (folder.path / "stray").write_bytes(b"x")
    folder.whole(file).write_bytes(b"12")  # checked once, and shorter now
    folder.prepare([file])
    kept = {path.name for path in folder.path.iterdir()}
    assert kept == {folder.part(file).name, PENDING_FILE}
    assert folder.held_bytes([file]) == {"a.bin": 4}
