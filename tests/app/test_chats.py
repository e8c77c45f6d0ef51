"""Chats on disk: what is written, what survives, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.chats import ChatError, ChatMessage, ChatSaveError, ChatStore, check_id, clean_title


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
    store.set_messages(chat.id, (question("first\nmessage"),))
    assert store.get(chat.id).title == "first message"
    store.rename(chat.id, "  my\ttitle ")
    store.set_messages(
        chat.id, (question("first"), ChatMessage("assistant", "yes", finish="stop"), question("b"))
    )
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
    store.set_messages(first.id, (question("one"), question("more")))
    assert [chat.id for chat in store.list()] == [first.id, second.id]


def test_a_deleted_chat_is_gone_from_disk_and_is_not_brought_back_by_its_answer(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    chat = store.create((question("one"),))
    store.delete(chat.id)
    with pytest.raises(ChatError, match="deleted"):
        store.save_answer(chat.id, ChatMessage("assistant", "late"))
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
    store.save_answer(chat.id, ChatMessage("assistant", "half an ans"))
    assert store.revision == revision
    kept = ChatStore(tmp_path).get(chat.id).messages[-1]
    assert (kept.content, kept.finish) == ("half an ans", None)
    store.save_answer(chat.id, ChatMessage("assistant", "half an answer", finish="stop"))
    assert store.revision == revision + 1
    assert [m.content for m in store.get(chat.id).messages] == ["one", "half an answer"]


def _file(**changed: object) -> str:
    whole = {"schema": 1, "id": "a" * 32, "title": "t", "created": 1, "updated": 1, "messages": []}
    return json.dumps({**whole, **changed})


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", "null", "[" * 100_000, '{"schema": 1}', '{"schema": "1", "id": "x"}', _file(id="b" * 32),
        _file(messages=[{"role": "system", "content": "x"}]), _file(created="then"), _file(schema=0),
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
    path.write_text('{"schema": 2, "everything": "else"}')
    store = ChatStore(tmp_path)
    assert store.list() == [] and "newer version" in store.reports[0]
    assert path.read_text() == '{"schema": 2, "everything": "else"}'


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


@pytest.mark.skipif(os.name == "nt", reason="file modes")
def test_chats_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    chat = ChatStore(tmp_path).create((question("one"),))
    assert (tmp_path / f"{chat.id}.json").stat().st_mode & 0o077 == 0
