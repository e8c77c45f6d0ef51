"""Chats on disk: what is written, what survives, what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.chat_file import chat_from_json, chat_to_json
from app.chat_tree import ROOT, MessageTree
from app.chats import Chat, ChatError, ChatMessage, ChatSaveError, ChatStore, check_id, clean_title


def question(text: str) -> ChatMessage:
    return ChatMessage("user", text, 1.0)


def test_a_chat_is_found_again_by_a_new_store(tmp_path: Path) -> None:
    chat = ChatStore(tmp_path).create((question("Tell me about foxes"),))
    found = ChatStore(tmp_path).get(chat.id)
    assert found == chat
    assert found.title == "Tell me about foxes"


def test_the_first_message_gives_the_title_and_a_rename_keeps(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    chat = store.create()
    assert chat.title == "New chat"
    store.add(chat.id, question("first\nmessage"), ROOT)
    assert store.get(chat.id).title == "first message"
    store.rename(chat.id, "  my\ttitle ")
    store.add(chat.id, question("b"), ROOT)
    assert ChatStore(tmp_path).get(chat.id).title == "my title"


@pytest.mark.parametrize(
    ("text", "title"),
    [("", "New chat"), ("\n \x00", "New chat"), ("x" * 200, "x" * 79 + "…"), ("a\u202eb", "a b")],
)
def test_titles_are_one_short_printable_line(text: str, title: str) -> None:
    assert clean_title(text) == title


def test_the_list_starts_with_the_chat_that_changed_last(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    first, second = store.create((question("one"),)), store.create((question("two"),))
    store.add(first.id, question("more"), 0)
    assert [chat.id for chat in store.list()] == [first.id, second.id]


def test_a_deleted_chat_is_gone_from_disk_and_is_not_brought_back_by_its_answer(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    chat = store.create((question("one"),))
    store.delete(chat.id)
    with pytest.raises(ChatError, match="deleted"):
        store.save_answer(chat.id, ChatMessage("assistant", "late"), 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad",
    ["../../etc/passwd", "A" * 32, "a" * 31, "a" * 33, "", "a" * 32 + "\n", "..", None, 5, "a" * 31 + "/"],
)
def test_only_hex_ids_are_taken(tmp_path: Path, bad: object) -> None:
    with pytest.raises(ChatError):
        check_id(bad)
    with pytest.raises(ChatError):
        ChatStore(tmp_path).get(bad)  # type: ignore[arg-type]


def test_an_unfinished_answer_is_on_disk_but_changes_no_list(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    chat = store.create((question("one"),))
    revision = store.revision
    node = store.save_answer(chat.id, ChatMessage("assistant", "half an ans"), 0)
    assert store.revision == revision
    kept = ChatStore(tmp_path).get(chat.id).messages[-1]
    assert (kept.content, kept.finish) == ("half an ans", None)
    store.save_answer(chat.id, ChatMessage("assistant", "half an answer", finish="stop"), 0, node)
    assert store.revision == revision + 1
    assert [m.content for m in store.get(chat.id).messages] == ["one", "half an answer"]


SCHEMA_1 = {"role": "user", "content": "hi", "created": 1, "finish": None, "error": "", "stats": {}}


def _file(**changed: object) -> str:
    whole = {"schema": 1, "id": "a" * 32, "title": "t", "created": 1, "updated": 1, "messages": []}
    return json.dumps({**whole, **changed})


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", "null", "[" * 100_000, '{"schema": 1}', '{"schema": "1", "id": "x"}', _file(id="b" * 32),
        _file(messages=[{"role": "system", "content": "x"}]), _file(created="then"), _file(schema=0),
        _file(schema=2), _file(schema=2, shown=0), _file(schema=2, shown=-1, messages={}),
        _file(schema=2, shown=0, messages=[{**SCHEMA_1, "parent": 0}]),  # it would follow itself
        _file(schema=2, shown=0, messages=[{**SCHEMA_1, "parent": -2}]),
        _file(schema=2, shown=True, messages=[{**SCHEMA_1, "parent": -1}] * 2),
        _file(updated=float("nan")), _file(messages=[{**SCHEMA_1, "runs": [-1]}]),
    ],
)  # fmt: skip
def test_a_damaged_file_is_kept_aside_and_reported(tmp_path: Path, content: str) -> None:
    good = ChatStore(tmp_path).create((question("good"),))
    (tmp_path / f"{'a' * 32}.json").write_text(content)
    store = ChatStore(tmp_path)
    assert [chat.id for chat in store.list()] == [good.id]
    (kept,) = tmp_path.glob("*.damaged")
    assert kept.read_text() == content
    assert len(store.reports) == 1 and kept.name in store.reports[0]


def test_binary_rubbish_is_kept_aside_too(tmp_path: Path) -> None:
    (tmp_path / f"{'a' * 32}.json").write_bytes(b"\xff\xfe\x00\x80")
    assert len(ChatStore(tmp_path).reports) == 1
    assert len(list(tmp_path.glob("*.damaged"))) == 1


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / f"{'a' * 32}.json"
    path.write_text('{"schema": 4, "everything": "else"}')
    store = ChatStore(tmp_path)
    assert store.list() == [] and "newer version" in store.reports[0]
    assert path.read_text() == '{"schema": 4, "everything": "else"}'


def test_text_that_is_no_unicode_is_mended_when_read(tmp_path: Path) -> None:
    chat = ChatStore(tmp_path).create((question("one"),))
    path = tmp_path / f"{chat.id}.json"
    path.write_text(path.read_text().replace('"content": "one"', '"content": "lone \\ud800 half"'))
    store = ChatStore(tmp_path)
    assert store.get(chat.id).messages[0].content == "lone ? half"
    store.rename(chat.id, "still writable")


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ChatStore(tmp_path)
    chat = store.create((question("one"),))
    before = (tmp_path / f"{chat.id}.json").read_text()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ChatSaveError, match="No space left"):
        store.rename(chat.id, "other")
    assert [path.read_text() for path in tmp_path.iterdir()] == [before]


def test_a_chat_that_the_disk_does_not_let_go_stays_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ChatStore(tmp_path)
    chat = store.create((question("one"),))

    def refuse(_path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(ChatSaveError, match=r"deleted in .* \(Read-only file system\): make it writable"):
            store.delete(chat.id)
    assert store.list() == [chat]
    assert store.rename(chat.id, "half \ud800").title == "half"
    assert ChatStore(tmp_path).get(chat.id).title == "half"


@pytest.mark.skipif(os.name == "nt", reason="file modes")
def test_chats_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    chat = ChatStore(tmp_path).create((question("one"),))
    assert (tmp_path / f"{chat.id}.json").stat().st_mode & 0o077 == 0


def test_a_file_of_the_first_schema_is_read_and_kept_whole_by_the_second(tmp_path: Path) -> None:
    stats = {"tokens_per_s": 3.5, "acceptance_rate": None, "approximate": False, "link": "PCIe"}
    turns = [
        {**SCHEMA_1, "content": "one"},
        {**SCHEMA_1, "role": "assistant", "content": "a \r\n b", "finish": "length", "stats": stats},
        {**SCHEMA_1, "content": "two", "created": 7},
    ]
    path = tmp_path / f"{'a' * 32}.json"
    path.write_text(_file(messages=turns, title="old", created=3, updated=5))
    chat = ChatStore(tmp_path).get("a" * 32)
    assert [asdict(message) for message in chat.messages] == [
        {**turn, "thought_s": 0.0, "runs": (), "images": ()} for turn in turns
    ]
    ChatStore(tmp_path).rename(chat.id, "new")
    again = ChatStore(tmp_path).get("a" * 32)
    assert json.loads(path.read_text())["schema"] == 2
    assert again == replace(chat, title="new") and (again.created, again.updated) == (3.0, 5.0)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=30), st.integers(0, 40))
@settings(max_examples=60)
def test_every_version_stays_reachable_whatever_was_asked(steps: list[tuple[int, bool]], shown: int) -> None:
    """Against a plain dictionary of parents."""
    tree, parents = MessageTree(), dict[int, int]()
    for node, (wanted, mine) in enumerate(steps):
        parent = wanted % (node + 1) - 1
        parents[node] = parent
        tree = tree.add(ChatMessage("user" if mine else "assistant", str(node)), parent)
        assert tree.leaf == node
    if steps:
        tree = tree.showing(shown % len(steps))
        assert tree.leaf not in parents.values() and shown % len(steps) in tree.path()
    chain, node = [], tree.leaf
    while node != ROOT:
        chain.append(node)
        node = parents[node]
    assert list(tree.path()) == chain[::-1]
    for parent, children in tree.children().items():
        assert children == [node for node, other in parents.items() if other == parent]
        assert all(node in tree.showing(node).path() for node in children)
    chat = Chat("a" * 32, "t", 1.0, 2.0, tree)
    assert chat_from_json(json.loads(json.dumps(chat_to_json(chat))), chat.id) == chat


def test_statistics_that_are_none_and_lengths_of_another_text_are_left_out(tmp_path: Path) -> None:
    stats = {"tokens_per_s": "fast", "hits": [1], "hit_rate": 0.5, "link": 5, "drafted": 1e400, "\n": 1}
    turn = {**SCHEMA_1, "role": "assistant", "stats": stats, "runs": [1, 5], "content": "hello"}
    path = tmp_path / f"{'a' * 32}.json"
    path.write_text(_file(messages=[turn, {**turn, "runs": [1, 4]}]))
    first, second = ChatStore(tmp_path).get("a" * 32).messages
    assert first.stats == {"hit_rate": 0.5, "New chat": 1} and first.runs == ()
    assert second.runs == (1, 4)
