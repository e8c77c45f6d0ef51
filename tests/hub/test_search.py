"""Searching the Hub over HTTP, and reading what a user pastes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelInfo
from hypothesis import given
from hypothesis import strategies as st
from support.hub_home import hub_and_home, small_model, weights
from support.hub_server import TOKEN, HubServer

from localmoe.core.errors import DownloadError, HubUnreachableError
from localmoe.engine.searching import architecture_kind, search_runnable
from localmoe.hub.names import is_repo_id
from localmoe.hub.search import find_repo, hit_of, search_models
from localmoe.hub.token import save_token

CONFIG = b'{"model_type": "%s", %s}'


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_and_home(tmp_path) as server:
        yield server


def repo(hub: HubServer, name: str, config: bytes, tags: tuple[str, ...] = (), *, safe: bool = True) -> None:
    files = {"config.json": config, "pytorch_model.bin": b"pickle"}
    hub.commit(name, {**files, "model.safetensors": weights(100)} if safe else files)
    hub.repos[name].tags = tags


def test_what_can_run_comes_first_and_the_rest_says_why_not(hub: HubServer) -> None:
    moe, dense = b'{"model_type": "qwen2_moe"}', b'{"model_type": "llama"}'
    repo(hub, "a/llama-chat", dense)
    repo(hub, "a/chat-gptq", b'{"model_type": "qwen2_moe", "quantization_config": {"quant_method": "gptq"}}')
    repo(hub, "a/Chat-AWQ", moe, ("awq", "4-bit"))
    repo(hub, "a/chat-awq", moe, ("awq", "8-bit"))
    four = b'{"model_type": "qwen2_moe", "quantization_config": {"quant_method": "%s", "bits": %d}}'
    repo(hub, "a/Chat-GPTQ", four % (b"gptq", 4), ("gptq", "4-bit"))
    repo(hub, "a/chat-gptq-8-bit", four % (b"gptq", 8), ("gptq", "8-bit"))
    repo(hub, "a/chat-rounded", four % (b"auto-round", 4), ("4-bit", "auto-round"))
    repo(hub, "a/chat-custom", b'{"model_type": "qwen2_moe", "auto_map": {"A": "b"}}')
    repo(hub, "a/chat-pickle", moe, safe=False)
    repo(hub, "a/chat-odd", b'{"model_type": "no_such_type"}')
    repo(hub, "a/chat-good", moe, ("license:mit",))
    packed = b'{"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}'
    repo(hub, "a/chat-oss", packed, ("mxfp4", "8-bit"))
    repo(hub, "a/chat-oss-mlx", packed, ("mxfp4", "mlx"))
    repo(hub, "a/chat-oss-tags", moe, ("mxfp4", "8-bit"))
    repo(hub, "a/chat-8-bit", moe, ("8-bit",))
    repo(hub, "a/chat-list", b'{"model_type": "gpt_oss", "quantization_config": ["mxfp4"]}', ("mxfp4",))
    eight = b'{"model_type": "qwen3_moe", "quantization_config": {"quant_method": "%s"}}'
    repo(hub, "a/chat-fp8", eight % b"fp8", ("fp8",))
    repo(hub, "a/chat-fp8-compressed", eight % b"compressed-tensors", ("fp8", "compressed-tensors", "8-bit"))
    repo(hub, "a/chat-ints", eight % b"compressed-tensors", ("compressed-tensors", "4-bit"))
    repo(hub, "a/chat-quantized.w4a16", eight % b"compressed-tensors", ("compressed-tensors",))
    repo(hub, "a/Chat-AWQ-4bit", eight % b"compressed-tensors", ("compressed-tensors",))
    repo(hub, "a/chat-mlx-4bit", moe, ("mlx", "4-bit"))
    repo(hub, "a/chat-bnb-4bit", eight % b"bitsandbytes", ("bitsandbytes", "4-bit"))
    repo(hub, "a/chat-compressed", eight % b"compressed-tensors", ("compressed-tensors",))
    repo(hub, "a/Chat-FP8", eight % b"compressed-tensors", ("8-bit", "compressed-tensors"))
    repo(hub, "a/chat-fp8-awq", eight % b"awq", ("4-bit",))
    repo(hub, "a/chat-fp8-modelopt", eight % b"modelopt", ("fp8", "modelopt", "8-bit"))
    repo(hub, "a/chat-fp8-and-mlx", eight % b"fp8", ("fp8", "mlx"))
    repo(hub, "a/chat-nvfp4", eight % b"compressed-tensors", ("compressed-tensors", "8-bit"))
    repo(hub, "a/chat-in-fours", eight % b"modelopt", ("NVFP4", "ModelOpt", "fp8", "8-bit"))
    repo(hub, "a/chat-named-fp8", eight % b"modelopt", ("ModelOpt",))
    listed = b'{"model_type": "qwen3_moe", "quantization_config": {"quant_method": ["modelopt"]}}'
    repo(hub, "a/chat-nvfp4-listed", listed)
    code = b'{"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"}'
    named = b'{"model_type": "phimoe", "auto_map": %s}' % code
    repo(hub, "a/chat-older-than-transformers", named, ("custom_code",))
    hub.commit("a/other", small_model())
    hits = search_runnable("CHAT")
    reasons = {hit.repo_id: hit.refusal for hit in hits}
    assert not hits[0].refusal and hits[-1].refusal and reasons.pop("a/chat-good") == ""
    # their weights are 16-bit floats too; where a search tells no config, that has the last word later
    assert reasons.pop("a/chat-older-than-transformers") == ""
    assert reasons.pop("a/chat-oss") == reasons.pop("a/chat-oss-tags") == ""
    named = "a/Chat-FP8", "a/chat-nvfp4", "a/chat-in-fours", "a/chat-named-fp8"
    integers = (
        "a/Chat-AWQ", "a/Chat-GPTQ", "a/chat-rounded", "a/chat-ints", "a/chat-quantized.w4a16",
        "a/Chat-AWQ-4bit",
    )  # fmt: skip
    for name in (*integers, "a/chat-fp8", "a/chat-fp8-compressed", "a/chat-fp8-modelopt", *named):
        assert reasons.pop(name) == ""
    good = next(hit for hit in hits if hit.repo_id == "a/chat-good")
    assert (good.architecture, good.licence, good.gated) == ("qwen2_moe", "mit", False)
    assert good.num_params is not None and good.downloads == 7
    words = {
        "a/llama-chat": "no Mixture of Experts", "a/chat-gptq": "quantised (gptq)", "a/chat-awq": "awq",
        "a/chat-custom": "code of its own", "a/chat-pickle": "no safetensors", "a/chat-odd": "does not know",
        "a/chat-oss-mlx": "(mlx)", "a/chat-8-bit": "(8-bit)", "a/chat-list": "(mxfp4)",
        "a/chat-fp8-awq": "(fp8)", "a/chat-nvfp4-listed": "(nvfp4)", "a/chat-gptq-8-bit": "(gptq)",
        "a/chat-mlx-4bit": "(4-bit, mlx)", "a/chat-bnb-4bit": "(bitsandbytes)",
        "a/chat-compressed": "(compressed-tensors)", "a/chat-fp8-and-mlx": "(mlx)",
    }  # fmt: skip
    assert reasons.keys() == words.keys()
    assert [name for name, word in words.items() if word not in reasons[name]] == []
    assert not hub.bodies()  # no file of any repo was fetched


def test_no_words_ask_for_the_tag_and_the_token_goes_along(hub: HubServer) -> None:
    repo(hub, "a/tagged", b'{"model_type": "mixtral"}', ("moe",))
    repo(hub, "a/untagged", b'{"model_type": "mixtral"}')
    assert [hit.repo_id for hit in search_models("  ")] == ["a/tagged"]
    assert hub.requests[-1].token is None
    save_token(TOKEN)
    search_models("x")
    assert hub.requests[-1].token == TOKEN


def test_models_for_text_and_pictures_are_found_too_and_the_most_downloaded_come_first(
    hub: HubServer,
) -> None:
    for number, task in enumerate(("text-generation", "image-text-to-text", "any-to-any", "image-to-video")):
        for name, downloads in (("some", 10 + number), ("most", 20 - number)):
            repo(hub, f"a/{name}-{task}", b'{"model_type": "qwen3_vl_moe"}')
            hub.repos[f"a/{name}-{task}"].task = task
            hub.repos[f"a/{name}-{task}"].downloads = downloads
    hits = search_runnable("A/", limit=5)
    assert [(hit.repo_id.partition("-")[0], hit.downloads) for hit in hits] == [
        ("a/most", 20), ("a/most", 19), ("a/most", 18), ("a/some", 12), ("a/some", 11),
    ]  # fmt: skip
    assert not any(hit.refusal or "video" in hit.repo_id for hit in hits)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_is_ill_or_away_is_said_so(
    hub: HubServer, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.api_faults.append(status)
    with pytest.raises(HubUnreachableError, match=f"answered {status}.*search again"):
        search_models("x")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachableError, match="connection lost"):
        search_models("x")


def test_a_refusal_is_one_sentence(hub: HubServer) -> None:
    hub.api_faults.append(403)
    with pytest.raises(DownloadError) as refusal:
        search_models("x")
    assert not isinstance(refusal.value, HubUnreachableError) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("answer", ["<html>", "{}", "[{}]", '[{"id": "a/b", "createdAt": "yesterday"}]'])
def test_an_answer_that_makes_no_sense_is_one_sentence(hub: HubServer, answer: str) -> None:
    hub.api_faults.append(answer.encode())
    with pytest.raises(DownloadError, match="answer to the search makes no sense"):
        search_models("x")


def test_architectures_are_judged_by_their_configs_defaults() -> None:
    kinds = {
        name: architecture_kind(name) for name in ("mixtral", "gpt_oss", "granitemoe", "llama4", "qwen3_next")
    }
    assert set(kinds.values()) == {"moe"}, kinds
    assert architecture_kind("llama") == architecture_kind("qwen3") == "dense"
    assert architecture_kind("qwen3_vl_moe") == architecture_kind("aria") == "moe"
    assert architecture_kind("mistral3") == architecture_kind("internvl") == "either"
    assert architecture_kind("") == architecture_kind("../x") == "unknown"


@pytest.mark.parametrize(
    ("text", "repo_id", "revision"),
    [
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", None),
        ("  a/b@v2 ", "a/b", "v2"),
        ("https://huggingface.co/a/b", "a/b", None),
        ("https://huggingface.co/a/b/tree/main/sub?x=1#y", "a/b", "main"),
        ("HTTP://mirror.example/models/a/b/blob/0f0f/config.json", "a/b", "0f0f"),
        ("https://huggingface.co/a/b/discussions/3", "a/b", None),
    ],
)
def test_a_pasted_repo_is_recognised(text: str, repo_id: str, revision: str | None) -> None:
    assert find_repo(text) == (repo_id, revision)


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/",
        "https://huggingface.co/datasets/a/b",
        "https://x.y/../..",
        "http://a/b",
        "https://[huggingface.co/a/b",
        "https://[a/b](https://huggingface.co/a/b)",
        "https://\u2100/a/b",
    ],
)
def test_an_address_of_no_model_is_refused(address: str) -> None:
    with pytest.raises(DownloadError, match="no address of a model"):
        find_repo(address)


@given(st.text(max_size=80))
def test_any_other_text_is_words_or_a_valid_repo(text: str) -> None:
    try:
        found = find_repo(text)
    except DownloadError as error:
        assert "\n" not in str(error)
        return
    assert found is None or (is_repo_id(found[0]) and "/" in found[0])


@pytest.mark.parametrize(
    ("said", "stored", "params"),
    [
        ({"quant_method": "gptq", "bits": 4}, {"I32": 100, "F16": 25, "BF16": 10}, 835),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"U8": 80, "F8_E4M3": 10, "BF16": 5}, 165),
        ({"quant_method": "mxfp4"}, {"U8": 170, "BF16": 5}, 325),
        ({"quant_method": "fp8"}, {"F8_E4M3": 100, "BF16": 5}, 105),
        ({"quant_method": "gptq", "bits": 8}, {"I32": 100}, 100),
        (None, {"BF16": 7}, 7),
    ],
    ids=str,
)
def test_weights_in_codes_are_counted_one_by_one(
    said: dict[str, object] | None, stored: dict[str, int], params: int
) -> None:
    """The Hub counts their words, or bytes."""
    config = {"model_type": "qwen3_moe", **({"quantization_config": said} if said else {})}
    info = ModelInfo(
        id="a/b", tags=[], config=config,
        safetensors={"parameters": stored, "total": sum(stored.values())},
    )  # fmt: skip
    assert hit_of(info).num_params == params
