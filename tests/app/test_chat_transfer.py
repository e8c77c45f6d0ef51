"""Chats as files: what goes out, what comes in, and what is refused; and looking for chats."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app_process import wait_for
from fake_engine import FakeLoader
from hypothesis import example, given, settings
from hypothesis import strategies as st
from picture_files import picture
from starlette.testclient import TestClient

from app.chat_file import Chat
from app.chat_markdown import export_markdown
from app.chat_search import ChatSearch
from app.chat_transfer import MAX_BYTES, MAX_MESSAGES, ChatImportError, export_json, import_chat
from app.chat_tree import ChatMessage, MessageTree
from app.chats import ChatError
from app.context_meter import NOTHING, ContextUse, context_use, has_room_to_continue, meter_html
from app.messages import history_entries, split_turns, turn_entries
from app.models.service import ModelsService
from app.pictures import PictureStore, picture_id
from app.server import make_app
from app.service import ChatService
from app.texts import ENGLISH, IN_CHINESE
from localmoe.chat.reasoning import split_reasoning

PORT = 7860
RED_ID, TEXT_ID = picture_id(picture("red")), picture_id(b"hi")
TURN: dict[str, Any] = {
    "role": "user",
    "content": "hi",
    "created": 1,
    "finish": None,
    "error": "",
    "stats": {},
}


def two_versions() -> Chat:
    answer = ChatMessage(
        "assistant", "<think>hm\nhm</think>\n\n**yes**", 2.0, "stop", thought_s=1.5, runs=(24, 5)
    )
    tree = MessageTree.line((ChatMessage("user", "Größe?", 1.0), answer))
    return Chat(
        "a" * 32, "Ein <b>Titel</b>", 1.0, 2.0, tree.add(ChatMessage("assistant", "no", 3.0, "stop"), 0)
    )


def test_what_is_exported_comes_back_with_every_version() -> None:
    chat = two_versions()
    again = import_chat(export_json(chat).encode()).chat
    assert again.tree == chat.tree and again.title == chat.title and again.created == chat.created
    assert again.id != chat.id and again.updated > 1e9


def test_the_markdown_is_that_of_the_shown_branch() -> None:
    chat = two_versions()
    user, answer = "<!-- localmoe:user -->\n## You", "<!-- localmoe:assistant -->\n## Answer"
    assert export_markdown(chat) == f"# Ein <b>Titel</b>\n\n{user}\n\nGröße?\n\n{answer}\n\nno\n"
    first = Chat(chat.id, chat.title, 1.0, 2.0, chat.tree.showing(1))
    thoughts = "<!-- localmoe:thoughts -->\n> hm\n> hm\n\n<!-- localmoe:answer -->\n**yes**\n"
    assert export_markdown(first).endswith(f"{answer}\n\n{thoughts}")
    assert "## 您" in export_markdown(chat, IN_CHINESE)


WORDS = ("a", "\n", " ", ">", "#", "*", "\\", "<!-- localmoe:", "user -->", "<think>", "</think>", "ß")
texts = st.lists(
    st.sampled_from(WORDS) | st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=24
).map("".join)


@given(st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=3), texts, st.sampled_from(["en", "zh"]))
@example([("", "", "")], "<!-- localmoe:\n\\<!-- localmoe:error -->\n*", "en")
@settings(max_examples=150)
def test_markdown_comes_back_as_the_branch_that_was_shown(
    turns: list[tuple[str, str, str]], error: str, language: str
) -> None:
    messages: list[ChatMessage] = []
    for question, thoughts, answer in turns:
        said = f"<think>{thoughts}</think>\n\n{answer}" if thoughts.strip() else answer
        messages += [ChatMessage("user", question, 1.0), ChatMessage("assistant", said, 2.0, "stop")]
    failed = error.strip()
    messages[-1] = replace(messages[-1], error=failed, finish="error" if failed else "stop")
    chat = Chat("a" * 32, "A title", 1.0, 2.0, MessageTree.line(tuple(messages)))
    again = import_chat(export_markdown(chat, IN_CHINESE if language == "zh" else ENGLISH).encode()).chat
    assert again.title == "A title" and len(again.messages) == len(messages)
    for back, was in zip(again.messages, messages, strict=True):
        assert (back.role, back.finish, back.error) == (was.role, was.finish, was.error)
        if was.role == "user":
            assert back.content == was.content.strip("\n")
        else:
            before, after = split_reasoning(was.content), split_reasoning(back.content)
            assert after.thoughts == "\n".join(line.rstrip() for line in before.thoughts.split("\n"))
            assert after.answer.strip("\n") == before.answer.strip("\n")


@pytest.mark.parametrize(
    "text", ["", "# A title\n\nwords", "<!-- localmoe:error -->\n*x*", "<!-- localmoe:other -->\nx",
             "<!-- localmoe:user -->\n## You\n\nhi\n\n<!-- localmoe:thoughts -->\n> x"],
)  # fmt: skip
def test_markdown_of_others_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ChatImportError, match="choose a JSON or Markdown file that was exported here"):
        import_chat(text.encode())


def test_a_strangers_texts_lose_what_is_no_text() -> None:
    chat = {
        "schema": 1, "id": "../../x", "title": "a\n\x1b[31mb" + "x" * 200, "created": 1, "updated": 1,
        "messages": [{**TURN, "content": "a\r\nb\x00\x1b\x9bc\ud800\u2028d\te"}],
    }  # fmt: skip
    found = import_chat(b"\xef\xbb\xbf" + json.dumps(chat).encode()).chat
    assert found.messages[0].content == "a\nbc?\nd\te"
    assert len(found.title) == 80 and found.title.isprintable() and len(found.id) == 32


def file_with(**changed: object) -> bytes:
    whole = {"schema": 2, "id": "x", "title": "t", "created": 1, "updated": 1, "shown": -1, "messages": []}
    return json.dumps({**whole, **changed}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff\xfe", b"[]", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b'"text"',
        file_with(schema=0), file_with(schema="2"), file_with(messages=5), file_with(messages={"a": 1}),
        file_with(messages=[{**TURN, "parent": 5}]),
        file_with(messages=[{**TURN, "parent": -1, "role": "tool"}]),
        file_with(messages=[TURN]), file_with(messages=["x"]), file_with(created=1e300), file_with(shown=7),
        file_with(messages=[{**TURN, "parent": -1, "stats": []}]), file_with(created=None),
        file_with(messages=[{**TURN, "parent": -1, "content": None}]),
        file_with(messages=[{**TURN, "parent": -1, "runs": "no"}]),
    ],
)  # fmt: skip
def test_what_is_no_chat_is_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(ChatImportError, match="no exported chat") as caught:
        import_chat(data)
    assert "\n" not in str(caught.value)


def test_a_chat_of_a_newer_version_is_refused_as_that() -> None:
    with pytest.raises(ChatImportError, match="a newer version of localmoe"):
        import_chat(file_with(schema=4))


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(ChatImportError, match=r"32\.0 MiB"):
        import_chat(b" " * (MAX_BYTES + 1))
    with pytest.raises(ChatImportError, match="20,001 messages"):
        import_chat(file_with(messages=[0] * (MAX_MESSAGES + 1)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(TURN),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*TURN, "parent"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["messages", "shown", "title", "schema", "created"]), json_values))
@settings(max_examples=100)
def test_any_json_is_taken_or_refused_and_nothing_else(changed: dict[str, object]) -> None:
    try:
        chat = import_chat(file_with(**changed)).chat
    except ChatImportError:
        return
    assert import_chat(export_json(chat).encode()).chat.tree == chat.tree


numbers = st.none() | st.booleans() | st.integers(-5, 10**17) | st.floats(-1e17, 1e17)
NAMED = (
    "prompt_tokens", "new_tokens", "earlier_tokens", "tokens_per_s", "ttft_s", "hit_rate", "drafted",
    "acceptance_rate", "draft_aside", "approximate", "link",
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMED), numbers), st.sampled_from(["stop", "length", None, "other"]))
@example({"prompt_tokens": None, "new_tokens": 5}, "length")
@settings(max_examples=100)
def test_a_page_shows_a_chat_whatever_its_statistics_are(
    stats: dict[str, object], finish: str | None
) -> None:
    answer = {**TURN, "role": "assistant", "content": "<think>a</think>b", "stats": stats, "finish": finish}
    turns = [{**turn, "parent": i - 1} for i, turn in enumerate((TURN, answer, TURN, answer))]
    chat = import_chat(file_with(messages=turns, shown=3)).chat
    for t in (ENGLISH, IN_CHINESE):
        history, turn = split_turns(chat)
        assert len(history_entries(history, t) + turn_entries(turn, None, t)) == 4
        assert meter_html(context_use(chat, 4096) or ContextUse(0, 4096, False, NOTHING), 100, t)
    assert has_room_to_continue(chat, 4096) in (True, False)


def test_a_markdown_file_of_the_largest_size_is_read_within_seconds() -> None:
    """Whatever it consists of."""
    part, began = "<!-- localmoe:answer -->\n" + "y" * 40 + "\n", time.process_time()
    text = "# t\n\n<!-- localmoe:assistant -->\n## Answer\n" + part * (MAX_BYTES // len(part) - 1)
    assert len(import_chat(text.encode()).chat.messages[0].content) > MAX_BYTES // 2
    assert time.process_time() - began < 30


def with_pictures(*images: str) -> Chat:
    look = ChatMessage("user", "look\n", 1.0, images=images)
    line = MessageTree.line((look, ChatMessage("assistant", "ok", 2.0, "stop"), ChatMessage("user", "x")))
    return Chat("b" * 32, "seen", 1.0, 2.0, line)


def test_an_export_brings_its_pictures_along() -> None:
    red, blue = picture("red"), picture("blue")
    chat = with_pictures(picture_id(red), picture_id(blue))
    exported = export_json(chat, {picture_id(red): red})
    again = import_chat(exported.encode())
    assert again.chat.tree == chat.tree and again.pictures == {picture_id(red): red}, "blue was missing there"
    assert "pictures" not in json.loads(export_json(two_versions()))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "no exported chat"), ({RED_ID: 5}, "no exported chat"), ({RED_ID: "?"}, "no exported chat"),
        ({RED_ID: "aGk="}, "no exported chat"), ({TEXT_ID: "aGk="}, "It is no picture that can be read"),
    ],
)  # fmt: skip
def test_a_picture_of_a_file_that_is_none_is_refused_in_one_sentence(given: object, sentence: str) -> None:
    found = json.loads(export_json(with_pictures(RED_ID, TEXT_ID)))
    with pytest.raises(ChatImportError, match=sentence):
        import_chat(json.dumps({**found, "pictures": given}).encode())


def test_a_picture_that_was_cut_keeps_no_chat_from_being_imported_again(tmp_path: Path) -> None:
    store = PictureStore(tmp_path)
    red, blue = store.keep(picture("red")), store.keep(picture("blue"))
    (tmp_path / blue).write_bytes(b"cut")
    chat = with_pictures(red, blue)
    again = import_chat(export_json(chat, store.read_all(chat.images)).encode())
    assert again.chat.images == (red, blue) and [*again.pictures] == [red]


def test_what_no_message_has_is_not_imported() -> None:
    found = json.loads(export_json(with_pictures()))
    assert import_chat(json.dumps({**found, "pictures": {"../x": "?"}}).encode()).pictures == {}


def test_pictures_do_not_count_as_texts_and_have_a_limit_of_their_own() -> None:
    found = json.loads(export_json(with_pictures()))
    large = "A" * (MAX_BYTES + 1)
    assert import_chat(json.dumps({**found, "pictures": {"x": large}}).encode()).chat.title == "seen"
    with pytest.raises(ChatImportError, match=r"32\.0 MiB"):
        import_chat(json.dumps({**found, "other": large}).encode())
    with pytest.raises(
        ChatError, match=r"no more than 128\.0 MiB can be imported again: export it as Markdown"
    ):
        export_json(with_pictures(), {"a" * 64: bytes(97 << 20)})


def test_a_large_file_of_little_beside_pictures_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As objects it would take thirty times the room, and as long as nobody else is answered."""
    monkeypatch.setattr("json.loads", lambda text: pytest.fail("it was read"))
    with pytest.raises(ChatImportError, match=r"32\.0 MiB"):
        import_chat(b'{"messages": [' + b"{}," * (MAX_BYTES // 3) + b'{}], "x": "' + b"A" * 99 + b'"}')


def test_an_answer_has_no_pictures_whatever_a_file_says() -> None:
    """Nobody would see which one is missing where the chat could not be gone on with."""
    turns = [{**TURN, "parent": -1}, {**TURN, "parent": 0, "role": "assistant", "images": [RED_ID]}]
    assert import_chat(file_with(schema=3, messages=turns, shown=1)).chat.images == ()


def test_markdown_names_pictures_and_brings_them_back_where_they_are() -> None:
    chat = with_pictures("a" * 64, "b" * 64)
    text = export_markdown(chat)
    assert f"look\n\n<!-- localmoe:pictures {'a' * 64} {'b' * 64} -->\n*Pictures, which only an " in text
    again = import_chat(text.encode()).chat.messages
    assert [m.images for m in again] == [m.images for m in chat.messages]
    assert [m.content for m in again] == ["look", "ok", "x"]
    with pytest.raises(ChatImportError):
        import_chat(export_markdown(with_pictures(*["a" * 64] * 9)).encode())


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    service = ChatService(tmp_path_factory.mktemp("home"), FakeLoader(), lambda: [])
    service.start()
    wait_for(lambda: service.holder.status().phase == "ready")
    service.chats.keep(two_versions())
    app = make_app(service, ModelsService(service.home, service, {}), PORT)
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}") as made:
        yield made
    service.close()


def test_the_addresses_give_and_take_chats(client: TestClient) -> None:
    given = client.get(f"/chats/{'a' * 32}.json")
    assert given.headers["content-disposition"].startswith('attachment; filename="chat.json"')
    assert given.headers["content-disposition"].endswith("Ein%20_b_Titel__b_.json")
    taken = client.post("/chats", content=given.content)
    assert taken.status_code == 200 and taken.json()["id"] != "a" * 32
    again = client.get(f"/chats/{taken.json()['id']}.json").json()
    assert again["messages"] == given.json()["messages"]
    text = client.get(f"/chats/{'a' * 32}.md?language=zh")
    assert "## 您" in text.text and text.headers["content-type"].startswith("text/markdown")
    assert client.get(f"/chats/{'b' * 32}.json").status_code == 404
    assert client.get("/chats/..%2F..%2Fsettings.json").status_code == 404


def test_a_bad_file_loses_nothing_and_other_sites_send_none(client: TestClient, tmp_path: Path) -> None:
    before = client.get(f"/chats/{'a' * 32}.json").content
    for data in (b"{", b" " * (MAX_BYTES + 5), file_with(id="a" * 32, schema=9)):
        answer = client.post("/chats", content=data)
        assert answer.status_code == 400 and answer.json()["error"].endswith(".")
    refused = client.post("/chats", content=before, headers={"origin": "http://evil.example"})
    assert refused.status_code == 403
    same_id = client.post("/chats", content=before.replace(b"yes", b"NO!"))
    assert same_id.status_code == 200
    assert client.get(f"/chats/{'a' * 32}.json").content == before


def test_a_chat_with_pictures_goes_from_one_home_to_another(client: TestClient, tmp_path: Path) -> None:
    service = ChatService(tmp_path, FakeLoader(), lambda: [])
    red = service.pictures.keep(picture("red"))
    service.chats.keep(with_pictures(red, "c" * 64))
    with TestClient(
        make_app(service, ModelsService(tmp_path, service, {}), PORT), base_url=f"http://127.0.0.1:{PORT}"
    ) as other:
        exported = other.get(f"/chats/{'b' * 32}.json").content
    service.close()
    assert client.get(f"/images/{red}").status_code == 404
    taken = client.post("/chats", content=exported)
    assert taken.status_code == 200
    assert client.get(f"/images/{red}").content == picture("red")
    again = client.get(f"/chats/{taken.json()['id']}.json").json()
    assert again["messages"][0]["images"] == [red, "c" * 64] and [*again["pictures"]] == [red]


def chat(number: int, title: str, *texts: str) -> Chat:
    messages = [ChatMessage("user", text) for text in texts]
    return Chat(f"{number:032x}", title, 1.0, 1.0, MessageTree.line(messages))


def test_chats_are_found_by_every_word_in_titles_and_texts() -> None:
    chats = [
        chat(1, "Foxes", "Tell me about STRASSE and\nfoxes " + "x" * 200),
        chat(2, "Other", "nothing here", "a fox in the " + "y " * 40 + "snow"),
        chat(3, "snow [1] (x"),
    ]
    search = ChatSearch()

    def found(query: str) -> list[int]:
        return [int(one.chat.id, 16) for one in search.find(chats, query)]

    assert found("") == found("  ") == [1, 2, 3]
    assert found("FOX") == [1, 2] and found("fox snow") == [2] and found("snow") == [2, 3]
    assert found("straße") == [1] and found("[1] (x") == [3] and found("absent") == []
    snippets = [one.snippet for one in search.find(chats, "snow")]
    assert snippets[0].startswith("…y y y y") and snippets[0].endswith("snow") and snippets[1] == ""
    assert search.find(chats, "about")[0].snippet.endswith("x…")
    changed = chat(1, "Foxes", "all new")
    assert [one.chat for one in search.find([changed], "new")] == [changed]
    assert search.find([changed], "strasse") == []
