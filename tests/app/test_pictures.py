"""Pictures of messages: how they are kept, checked, removed and told to the model."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from app_process import wait_for
from fake_engine import SEEING, FakeEngine, FakeLoader
from picture_files import picture

from app import pictures as module
from app.chat_file import Chat
from app.chat_search import Found
from app.chats import ChatError, ChatMessage, ChatStore
from app.context_meter import context_use
from app.messages import history_entries
from app.pictures import MAX_PICTURES, PictureError, PictureStore, picture_kind
from app.pictures_html import pictures_html
from app.requests import attached_pictures, request_messages
from app.service import ChatService
from app.settings import AnswerSettings, LoadSettings, SettingsStore
from app.tabs.sidebar import chat_list_html
from app.texts import IN_CHINESE
from localmoe.core.errors import ConfigError
from localmoe.core.types import Image, Message

RED, BLUE = picture("red"), picture("blue")
DAY_S = 24 * 3600.0


@pytest.fixture
def store(tmp_path: Path) -> PictureStore:
    return PictureStore(tmp_path / "images")


@pytest.fixture
def seeing(tmp_path: Path, loader: FakeLoader) -> Iterator[ChatService]:
    """A service whose model reads pictures."""
    SettingsStore(tmp_path / "settings.json").save(load=LoadSettings(model=SEEING), answers=AnswerSettings())
    made = ChatService(tmp_path, loader, lambda: [])
    made.start()
    wait_for(lambda: made.holder.status().phase == "ready", what="the fake model")
    yield made
    made.close()


def finish(service: ChatService) -> None:
    wait_for(lambda: not service.runner.running(), 5.0, "the end of the answer")


def last_request(loader: FakeLoader) -> tuple[Message, ...]:
    engine: FakeEngine = loader.engines[-1]
    return engine.requests[-1].messages


# --- the folder


def test_a_picture_is_kept_once_by_the_hash_of_its_bytes(store: PictureStore, tmp_path: Path) -> None:
    found = store.keep(RED)
    assert found == hashlib.sha256(RED).hexdigest() == store.keep(RED)
    assert [path.name for path in (tmp_path / "images").iterdir()] == [found]
    assert store.read(found) == RED and store.has(found)
    assert stat.S_IMODE((tmp_path / "images").stat().st_mode) == 0o700


@pytest.mark.parametrize("wanted", ["", "a" * 63, "A" * 64, "a" * 64 + "\n", "../" + "a" * 61, "a" * 64])
def test_nothing_else_becomes_the_name_of_a_file(store: PictureStore, wanted: str) -> None:
    assert not store.has(wanted)
    with pytest.raises(PictureError, match="attach the same file again"):
        store.read(wanted)


@pytest.mark.parametrize("data", [b"", b"text", b"<svg/>", b"\x89PNG\r\n\x1a\n", picture(size=(4000, 2))])
def test_what_the_model_could_not_read_is_not_kept(store: PictureStore, tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"use .*\."):
        store.keep(data)
    assert not (tmp_path / "images").exists()


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    store: PictureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write_whole", full)
    with pytest.raises(PictureError, match=r"^The picture could not be saved in .*: make room there and try"):
        store.keep(RED)
    assert list((tmp_path / "images").iterdir()) == []


def test_attaching_a_file_again_mends_one_that_the_disk_has_damaged(
    store: PictureStore, tmp_path: Path
) -> None:
    found = store.keep(RED)
    for damaged in (RED[:20], bytes(len(RED))):
        (tmp_path / "images" / found).write_bytes(damaged)
        with pytest.raises(PictureError, match="attach the same file again, which brings it back"):
            store.read(found)
        assert store.read_all((found,)) == {}
        store.keep(RED)
        assert store.read(found) == RED and store.read_all((found,)) == {found: RED}


@pytest.mark.parametrize(
    ("kind", "media"),
    [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("GIF", "image/gif"),
     ("BMP", "image/bmp")],
)  # fmt: skip
def test_its_kind_is_known_by_how_it_begins(kind: str, media: str) -> None:
    assert picture_kind(picture(kind=kind)) == media


def age(folder: Path, name: str) -> Path:
    path = folder / name
    os.utime(path, (0, time.time() - DAY_S - 60))
    return path


def test_old_pictures_that_no_chat_has_go_at_the_next_start(tmp_path: Path, loader: FakeLoader) -> None:
    first = ChatService(tmp_path, loader, lambda: [])
    ids = [first.pictures.keep(picture(colour)) for colour in ("red", "green", "blue", "white")]
    first.chats.create((ChatMessage("user", "", images=(ids[0],)),))
    deleted = first.chats.create((ChatMessage("user", "", images=(ids[1],)),))
    first.delete(deleted.id)
    first.close()
    folder = tmp_path / "images"
    kept = [age(folder, ids[0]), folder / ids[3]]  # of a chat; young
    gone = [age(folder, ids[1]), age(folder, ids[2]), folder / f".{ids[1]}.abc.part"]
    gone[2].write_bytes(b"half")
    other = folder / "notes.txt"
    other.write_text("mine")
    assert all(path.exists() for path in gone), "of the deleted one it was attached once more since"
    ChatService(tmp_path, loader, lambda: []).close()
    assert [path.exists() for path in [*kept, other, *gone]] == [True] * 3 + [False] * 3


def test_a_deleted_chat_takes_its_pictures_along_but_those_that_are_wanted(seeing: ChatService) -> None:
    ids = [seeing.pictures.keep(picture(colour)) for colour in ("red", "green", "blue")]
    first = seeing.send(None, "look", ids)
    finish(seeing)
    seeing.edit(first, 0, "look again")
    finish(seeing)
    second = seeing.send(None, "and there", (ids[1],))
    finish(seeing)
    seeing.pictures.keep(picture("blue"))  # for a message that is not sent yet
    seeing.delete(first)
    assert [seeing.pictures.has(one) for one in ids] == [False, True, True]
    seeing.delete(second)
    assert [seeing.pictures.has(one) for one in ids] == [False, False, True]


def test_a_picture_that_is_attached_again_is_young_again(store: PictureStore, tmp_path: Path) -> None:
    found = store.keep(RED)
    age(tmp_path / "images", found)
    store.keep(RED)
    store.remove_unused(set())
    assert store.has(found)


@pytest.mark.parametrize("text", ['{"schema": 9, "x": "ID"}', '{"messages": [{"images": ["ID"'])
def test_pictures_of_chats_that_cannot_be_read_stay(tmp_path: Path, loader: FakeLoader, text: str) -> None:
    found = PictureStore(tmp_path / "images").keep(RED)
    age(tmp_path / "images", found)
    chats = tmp_path / "chats"
    chats.mkdir()
    (chats / f"{'a' * 32}.json").write_text(text.replace("ID", found))
    service = ChatService(tmp_path, loader, lambda: [])
    assert len(service.reports()) == 1 and service.pictures.has(found)


def test_where_nobody_knows_what_is_used_nothing_goes(
    store: PictureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = store.keep(RED)
    age(tmp_path / "images", found)
    chats = ChatStore(tmp_path / "chats")
    (tmp_path / "chats" / "x.damaged").write_text("{")

    def unreadable(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "no", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", unreadable)
        store.remove_unused(chats.pictures())
    assert store.has(found)
    store.remove_unused(chats.pictures())
    assert not store.has(found)


# --- the chat's file


def chat_of(folder: Path, *images: str) -> Chat:
    return ChatStore(folder).create((ChatMessage("user", "see", 1.0, images=images),))


def test_a_chat_keeps_the_pictures_of_its_messages(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, "a" * 64, "b" * 64)
    path = tmp_path / f"{chat.id}.json"
    assert json.loads(path.read_text())["schema"] == 3, "an older version would drop them"
    assert ChatStore(tmp_path).get(chat.id).messages[0].images == ("a" * 64, "b" * 64)


def test_a_chat_of_texts_is_written_as_before(tmp_path: Path) -> None:
    chat = chat_of(tmp_path)
    found = json.loads((tmp_path / f"{chat.id}.json").read_text())
    assert found["schema"] == 2 and "images" not in found["messages"][0]
    assert ChatStore(tmp_path).get(chat.id).messages[0].images == ()


@pytest.mark.parametrize(
    "images", ["x", None, {"a": 1}, [1], ["A" * 64], ["../" + "a" * 61], ["a" * 65], ["a" * 64] * 9]
)
def test_a_file_with_other_pictures_is_damaged(tmp_path: Path, images: object) -> None:
    chat = chat_of(tmp_path, "a" * 64)
    path = tmp_path / f"{chat.id}.json"
    found = json.loads(path.read_text())
    found["messages"][0]["images"] = images
    path.write_text(json.dumps(found))
    store = ChatStore(tmp_path)
    assert store.list() == [] and len(list(tmp_path.glob("*.damaged"))) == 1


# --- what the model is told


def test_pictures_come_before_the_text_of_their_message() -> None:
    turns = (
        ChatMessage("user", "one", images=("a", "b")), ChatMessage("assistant", "two"),
        ChatMessage("user", "", images=("c",)),
    )  # fmt: skip
    assert request_messages(turns, "", str.encode) == (
        Message("user", "one", images=(Image(b"a"), Image(b"b"))), Message("assistant", "two"),
        Message("user", "", images=(Image(b"c"),)),
    )  # fmt: skip


def test_a_picture_is_sent_without_text_and_named_by_what_is_asked_next(
    seeing: ChatService, loader: FakeLoader
) -> None:
    chat_id = seeing.send(None, "  ", (seeing.pictures.keep(RED),))
    finish(seeing)
    chat = seeing.chats.get(chat_id)
    assert chat.messages[1].content.startswith("I see 1 of them.") and chat.title == "New chat"
    assert last_request(loader) == (Message("user", "", images=(Image(RED),)),)
    assert context_use(chat, 4096) is not None
    seeing.send(chat_id, "and now?")
    finish(seeing)
    assert [len(message.images) for message in last_request(loader)] == [1, 0, 0]
    assert seeing.chats.get(chat_id).title == "and now?"


def test_edit_retry_and_continue_keep_the_pictures(seeing: ChatService, loader: FakeLoader) -> None:
    ids = (seeing.pictures.keep(RED), seeing.pictures.keep(BLUE))
    chat_id = seeing.send(None, "a long story", ids)
    wait_for(lambda: len(seeing.runner.view().text) > 100)  # type: ignore[union-attr]
    seeing.runner.stop()
    seeing.continue_answer(chat_id)
    wait_for(lambda: len(loader.engines[-1].requests) == 2)
    seeing.runner.stop()
    assert [len(message.images) for message in last_request(loader)] == [2, 0]
    seeing.retry(chat_id)
    wait_for(lambda: len(loader.engines[-1].requests) == 3)
    seeing.runner.stop()
    assert [len(message.images) for message in last_request(loader)] == [2]
    seeing.edit(chat_id, 0, "")
    finish(seeing)
    assert last_request(loader) == (Message("user", "", images=(Image(RED), Image(BLUE))),)
    question = seeing.chats.get(chat_id).messages[0]
    assert (question.content, question.images) == ("", ids)
    seeing.show(chat_id, 0)
    assert seeing.chats.get(chat_id).messages[0].content == "a long story"


def test_an_edit_takes_other_pictures_also_in_the_place_of_one_that_is_gone(
    seeing: ChatService, loader: FakeLoader, tmp_path: Path
) -> None:
    red, blue = seeing.pictures.keep(RED), seeing.pictures.keep(BLUE)
    chat_id = seeing.send(None, "see", (red,))
    finish(seeing)
    (tmp_path / "images" / red).unlink()
    with pytest.raises(PictureError, match="is not on the disk any more"):
        seeing.edit(chat_id, 0, "see")
    with pytest.raises(ChatError, match="9 pictures: send at most 8"):
        seeing.edit(chat_id, 0, "see", (blue,) * 9)
    seeing.edit(chat_id, 0, "see", (blue,))
    finish(seeing)
    assert last_request(loader) == (Message("user", "see", images=(Image(BLUE),)),)
    seeing.edit(chat_id, 2, "see", ())
    finish(seeing)
    assert last_request(loader) == (Message("user", "see"),)
    assert [m.images for m in seeing.chats.get(chat_id).tree.nodes if m.role == "user"] == [
        (red,),
        (blue,),
        (),
    ]


def test_a_message_needs_text_or_a_picture_and_takes_eight(seeing: ChatService) -> None:
    with pytest.raises(ChatError, match="empty"):
        seeing.send(None, " ")
    found = seeing.pictures.keep(RED)
    with pytest.raises(ChatError, match="9 pictures: send at most 8"):
        seeing.send(None, "x", (found,) * (MAX_PICTURES + 1))
    assert seeing.chats.list() == []


def test_where_a_picture_is_missing_nothing_is_asked_and_nothing_changed(
    seeing: ChatService, loader: FakeLoader, tmp_path: Path
) -> None:
    found = seeing.pictures.keep(RED)
    chat_id = seeing.send(None, "see", (found,))
    finish(seeing)
    before, asked = seeing.chats.get(chat_id), len(loader.engines[-1].requests)
    (tmp_path / "images" / found).unlink()
    for ask in (
        lambda: seeing.retry(chat_id), lambda: seeing.edit(chat_id, 0, "other"),
        lambda: seeing.send(chat_id, "more"), lambda: seeing.send(None, "new", (found,)),
    ):  # fmt: skip
        with pytest.raises(PictureError, match="is not on the disk any more: attach the same file again"):
            ask()
    assert seeing.chats.list() == [before] and len(loader.engines[-1].requests) == asked
    seeing.pictures.keep(RED)
    seeing.retry(chat_id)
    finish(seeing)
    assert seeing.chats.get(chat_id).messages[1].error == ""


def test_one_that_goes_as_it_is_read_ends_the_answer_in_its_sentence(
    seeing: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = seeing.pictures.keep(RED)

    def unreadable(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", unreadable)
    chat_id = seeing.send(None, "see", (found,))
    finish(seeing)
    answer = seeing.chats.get(chat_id).messages[1]
    assert answer.finish == "error" and "could not be read from" in answer.error


def test_a_model_that_reads_none_refuses_and_nothing_is_lost(
    service: ChatService, loader: FakeLoader
) -> None:
    found = service.pictures.keep(RED)
    chat_id = service.send(None, "see", (found,))
    finish(service)
    chat = service.chats.get(chat_id)
    assert chat.messages[0].images == (found,)
    assert chat.messages[1].error == "fake-moe reads no pictures: load a model that does."
    service.send(None, "hello")
    finish(service)
    assert last_request(loader) == (Message("user", "hello"),)


@pytest.mark.parametrize("told", ["{", "{}", "[1]", '["x"]', f'["{"a" * 64}", ""]', "[" * 100_000])
def test_what_was_not_attached_is_not_left_out_silently(told: str) -> None:
    with pytest.raises(ChatError, match="A picture was not attached"):
        attached_pictures(told)
    assert attached_pictures("") == attached_pictures("[]") == attached_pictures(None) == ()
    assert attached_pictures(f'["{"a" * 64}"]') == ("a" * 64,)


# --- what the page shows


def test_pictures_are_shown_by_list_and_place_of_their_question(tmp_path: Path) -> None:
    one, two = "1" * 64, "2" * 64
    answer = ChatMessage("assistant", "ok", finish="stop")
    chat = ChatStore(tmp_path).create(
        (ChatMessage("user", "first"), answer, ChatMessage("user", "", images=(one, two)), answer,
         ChatMessage("user", "third", images=(one,)), answer)
    )  # fmt: skip
    html = pictures_html(chat, 40, lambda picture: picture == one)
    assert html.count('<ul class="lm-pictures"') == 2
    assert (
        'data-list="history" data-user="1" data-alone' in html
        and 'data-list="turn" data-user="0" aria' in html
    )
    assert f'<a href="/images/{one}" target="_blank"' in html and 'alt="Picture 1 of 2"' in html
    assert f"/images/{two}" not in html and "A picture that is not on the disk any more" in html
    assert 'data-list="history" data-user="0"' in pictures_html(chat, 2, lambda picture: True)
    assert 'data-list="history"' not in pictures_html(chat, 0, lambda picture: True)
    assert "图片已不在磁盘上" in pictures_html(chat, 40, lambda picture: False, IN_CHINESE)
    assert pictures_html(None, 40, lambda picture: True) == ""
    assert history_entries(chat.messages[2:3])[0]["content"][0]["text"] == "", "its text is empty"


def test_a_chat_without_a_word_is_called_new_in_the_page_s_language(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, "a" * 64)
    store = ChatStore(tmp_path)
    store.rename(chat.id, "")
    listed = [Found(store.get(chat.id))]
    assert ">New chat<" in chat_list_html(listed, None)
    assert ">新聊天<" in chat_list_html(listed, None, None, IN_CHINESE)
