"""Answers about pictures, against transformers' own, with drafts, slots, turns and chats that come back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import Answer, ask, load_with_slots
from support.vision_models import (
    IMAGE_TOKEN_ID,
    READING_ARCHITECTURES,
    picture,
    reference_answer,
    shown,
    vision_model,
    write_vision_model,
)

from localmoe.chat import prompt_cache
from localmoe.chat.prompt_cache import PromptCache
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import CheckpointError, ConfigError, ContextLengthError, HardwareError
from localmoe.core.live_state import PromptState
from localmoe.core.types import Image, Message
from localmoe.engine import Engine, images, sessions
from localmoe.model import runner
from localmoe.vision.source import VisionSource

ONE, OTHER, WIDE, HIGH = picture(1), picture(2), picture(3, 192, 64), picture(4, 64, 320)
TOKENS = 10
Reading = tuple[Any, Path]
# what no encoder has a part in
of_one_in_a_plain_run = pytest.mark.slow(but=1)


@pytest.fixture(scope="module", params=READING_ARCHITECTURES)
def reading(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reading:
    model = vision_model(request.param)
    return model, write_vision_model(tmp_path_factory.mktemp("vision") / request.param, model)


def loaded(folder: Path, **config: Any) -> Engine:
    return Engine.load(str(folder), EngineConfig(device="cpu", **{"draft_length": 0, **config}))


@pytest.fixture(scope="module")
def used_engine(reading: Reading) -> Iterator[Engine]:
    with loaded(reading[1]) as made:
        yield made


@pytest.fixture
def engine(used_engine: Engine) -> Engine:
    """One that has read other pictures and texts, which it has forgotten."""
    used_engine.reset()
    return used_engine


def pictures_of(messages: list[Message]) -> list[bytes]:
    return [image.data for message in messages for image in message.images]


def source_of(engine: Engine) -> VisionSource:
    found = engine.prepared.source.vision()
    assert found is not None
    return found


def is_right(reading: Reading, messages: list[Message], answer: Answer) -> bool:
    """Whether transformers' own answer to the same prompt has the same tokens."""
    model, folder = reading
    count = len(answer.tokens)
    return answer.tokens == reference_answer(model, folder, answer.prompt, pictures_of(messages), count)


@pytest.mark.parametrize("num_slots", [None, pytest.param(10, marks=pytest.mark.slow(but=2))])
def test_answers_about_pictures_are_those_of_transformers(reading: Reading, num_slots: int | None) -> None:
    folder = reading[1]
    engine = loaded(folder) if num_slots is None else load_with_slots(folder, num_slots, draft_length=0)
    with engine:
        for told in (
            [shown("what is this", (0, ONE))],
            [shown("one  and two", (4, OTHER), (12, WIDE))],
            [shown("", (0, HIGH), (0, ONE))],
        ):
            assert is_right(reading, told, ask(engine, told, TOKENS))


def test_a_picture_that_goes_through_several_passes_is_read_as_in_one(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [shown("look", (2, HIGH), (4, WIDE))]
    monkeypatch.setattr(runner, "PREFILL_CHUNK", 7)
    with loaded(reading[1]) as engine:
        assert is_right(reading, told, ask(engine, told, TOKENS))


@pytest.mark.parametrize("num_slots", [None, 10])
@pytest.mark.parametrize(
    "reading", ["qwen3_vl_moe"], indirect=True
)  # of the other one nothing is drafted here
def test_no_draft_changes_an_answer_about_pictures(reading: Reading, num_slots: int | None) -> None:
    folder = reading[1]
    config: dict[str, Any] = {"draft_length": 3}
    engine = loaded(folder, **config) if num_slots is None else load_with_slots(folder, num_slots, **config)
    with engine:
        told: list[Message] = []
        for asked in (shown("what", (4, ONE)), shown("and", (0, WIDE)), shown("so")):
            told.append(asked)
            drafted = ask(engine, told, TOKENS)
            assert drafted.stats.drafted > 0
            assert is_right(reading, told, drafted)
            assert ask(engine, told, TOKENS, draft_length=0).tokens == drafted.tokens
            told.append(Message("assistant", drafted.text))


def test_a_chat_goes_on_where_it_was_and_another_picture_is_another_text(
    reading: Reading, engine: Engine
) -> None:
    told = [shown("which", (0, ONE))]
    first = ask(engine, told, TOKENS)
    told += [Message("assistant", first.text), shown("and", (0, WIDE))]
    second = ask(engine, told, TOKENS)
    assert is_right(reading, told, second)
    if reading[0].config.model_type == "qwen3_vl_moe":  # the other's state goes back to no place
        assert second.stats.reused_tokens >= len(first.prompt) - 1
    swapped = [shown("which", (0, OTHER)), *told[1:]]
    again = ask(engine, swapped, TOKENS)
    assert again.stats.reused_tokens <= again.prompt.index(IMAGE_TOKEN_ID)
    assert len(again.prompt) == len(second.prompt) and again.prompt == second.prompt
    assert is_right(reading, swapped, again)


def test_a_chat_that_was_left_comes_back_with_its_pictures(
    reading: Reading, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache, "LEAST_TOKENS", 8)
    told = [shown("a long question about this one", (20, HIGH))]
    first = ask(engine, told, TOKENS)
    told += [Message("assistant", first.text), shown("so")]
    ask(engine, [shown("something else, and no picture")], TOKENS)
    back = ask(engine, told, TOKENS)
    assert is_right(reading, told, back)


@of_one_in_a_plain_run
def test_texts_without_pictures_are_answered_as_by_an_engine_that_saw_none(
    reading: Reading, engine: Engine
) -> None:
    plain = [shown("no picture here"), Message("assistant", "none"), shown("none at all")]
    with loaded(reading[1]) as other:
        wanted = ask(other, plain, TOKENS).tokens
    ask(engine, [shown("look", (0, WIDE))], TOKENS)
    assert ask(engine, plain, TOKENS).tokens == wanted
    raw = GenerationRequest(prompt_token_ids=(20, IMAGE_TOKEN_ID, IMAGE_TOKEN_ID, 21), max_new_tokens=4)
    assert len([token for event in engine.stream(raw) for token in event.token_ids]) == 4


@of_one_in_a_plain_run
def test_a_picture_is_read_once(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(images, "log_image", lambda tokens, seconds: read.append(tokens))
    with loaded(reading[1]) as engine:
        told = [shown("one", (0, ONE))]
        first = ask(engine, told, 2)
        ask(engine, [shown("other words for it", (3, ONE))], 2)
        assert read == [first.prompt.count(IMAGE_TOKEN_ID)]
        both = ask(engine, [*told, Message("assistant", "a"), shown("b", (0, WIDE))], 2)
        assert len(read) == 2 and sum(read) == both.prompt.count(IMAGE_TOKEN_ID)


@of_one_in_a_plain_run
def test_who_waits_is_told_of_pictures_that_are_to_be_read(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(reading[1]) as engine:
        told: list[PromptState | None] = []
        monkeypatch.setattr(images, "log_image", lambda *what: told.append(engine.live.prompt()))
        answer = ask(engine, [shown("two", (0, ONE), (3, WIDE))], 2)
        count = len(answer.prompt)
        assert told == [PromptState(count, 0, 0, images=2), PromptState(count, 0, 0, images=1)]


@of_one_in_a_plain_run
def test_stop_ends_the_reading_of_pictures(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(reading[1]) as engine:
        stop, read = threading.Event(), []
        monkeypatch.setattr(images, "log_image", lambda *what: (read.append(what), stop.set()))
        told = (shown("two", (0, ONE), (3, WIDE)),)
        events = list(engine.stream(GenerationRequest(messages=told, max_new_tokens=4), stop))
        assert [event.finish_reason for event in events] == ["cancelled"] and len(read) == 1
        assert not engine.live.prompt()
        assert is_right(reading, list(told), ask(engine, list(told), 4)) and len(read) == 2


@of_one_in_a_plain_run
def test_what_is_no_picture_or_does_not_fit_is_refused_and_nothing_is_lost(reading: Reading) -> None:
    with loaded(reading[1], context=128) as engine:
        told = [shown("one", (0, ONE))]
        first = ask(engine, told, 4)
        with pytest.raises(ConfigError, match="no picture that can be read"):
            ask(engine, [Message("user", "x", images=(Image(b"nothing"),))], 4)
        with pytest.raises(ContextLengthError, match="The prompt has 1"):
            ask(engine, [shown("many", *[(4, picture(seed, 256, 256)) for seed in range(2)])], 4)
        assert ask(engine, told, 4).tokens == first.tokens


@of_one_in_a_plain_run
def test_an_encoder_that_cannot_be_read_leaves_texts_to_be_answered(
    reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_vision_model(tmp_path / "m", reading[0])
    file = folder / "model.safetensors"
    stored = load_file(file)
    gone = next(
        name for name in stored if "visual.blocks.1" in name or "vision_tower.encoder.layers.1" in name
    )
    save_file({name: one for name, one in stored.items() if name != gone}, file, metadata={"format": "pt"})
    with loaded(folder) as engine:
        text = ask(engine, [shown("text")], 4).tokens
        with pytest.raises(CheckpointError, match="1 weights of what reads pictures are missing"):
            ask(engine, [shown("one", (0, ONE))], 4)
        assert ask(engine, [shown("text")], 4).tokens == text
    with loaded(reading[1]) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(images, "ram_bytes", lambda: (1 << 30, 1 << 20))
            with pytest.raises(HardwareError, match="of RAM for the model's vision encoder"):
                ask(engine, [shown("one", (0, ONE))], 4)
            assert engine.live.prompt() is None
        told = [shown("one", (0, ONE))]
        assert is_right(reading, told, ask(engine, told, 4))


@of_one_in_a_plain_run
def test_texts_that_were_left_give_way_to_the_encoder(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache, "LEAST_TOKENS", 8)
    texts = PromptCache(lambda held: 1 << 30)
    monkeypatch.setattr(sessions, "PromptCache", lambda room: texts)
    with loaded(reading[1]) as engine:
        ask(engine, [shown("a text that is left for one that has a picture")], 2)
        ask(engine, [shown("and a second one of them")], 2)
        needed = source_of(engine).encoder(torch.float32).num_bytes
        free = int(needed / 0.75) - texts.num_bytes // 2  # of which a quarter stays free
        monkeypatch.setattr(images, "ram_bytes", lambda: (1 << 30, free))
        told = [shown("one", (0, ONE))]
        assert len(texts) and is_right(reading, told, ask(engine, told, 2))
        assert not len(texts)


@of_one_in_a_plain_run
def test_an_encoder_that_cannot_be_read_costs_no_text_that_was_left(
    reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache, "LEAST_TOKENS", 8)
    texts = PromptCache(lambda held: 1 << 30)
    monkeypatch.setattr(sessions, "PromptCache", lambda room: texts)
    with loaded(write_vision_model(tmp_path / "m", reading[0])) as engine:
        ask(engine, [shown("a text that is left for another one")], 2)
        ask(engine, [shown("which has no picture either")], 2)
        left = len(texts)
        (tmp_path / "m" / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="No such file"):
            ask(engine, [shown("one", (0, ONE))], 2)
        assert len(texts) >= left > 0


@of_one_in_a_plain_run
def test_a_model_without_its_processors_settings_says_what_is_missing_or_damaged(
    reading: Reading, tmp_path: Path
) -> None:
    folder = write_vision_model(tmp_path / "m", reading[0])
    for file in folder.glob("*processor_config.json"):
        file.unlink()
    with loaded(folder) as engine:
        assert not engine.info().reads_images and engine.footprint.text_alone
        with pytest.raises(ConfigError, match=r"said by preprocessor_config\.json or .* pull` fetches"):
            ask(engine, [shown("one", (0, ONE))], 4)
        assert ask(engine, [shown("text")], 2).tokens
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": "large"}))
    with loaded(folder) as engine:
        assert not engine.info().reads_images
        with pytest.raises(ConfigError, match=r"preprocessor_config\.json cannot be used .* or ask without"):
            ask(engine, [shown("one", (0, ONE))], 4)
        assert ask(engine, [shown("text")], 2).tokens


def test_engines_say_whether_they_read_pictures(engine: Engine) -> None:
    assert engine.info().reads_images and not engine.footprint.text_alone


def test_an_engine_that_reads_none_says_so() -> None:
    with Engine.load("demo", EngineConfig(draft_length=0)) as engine:
        assert not engine.info().reads_images
        with pytest.raises(ConfigError, match="reads no pictures"):
            ask(engine, [shown("one", (0, ONE))], 4)
