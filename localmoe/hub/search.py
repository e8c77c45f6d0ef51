"""Searches the Hub for text models, and reads the repo that a pasted text names. Decides from tags alone what
cannot be loaded; whether the engine knows an architecture is engine.searching's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub.hf_api import ModelInfo

from localmoe.core.errors import DownloadError, HubUnreachableError
from localmoe.hub.float8_tensors import is_float8
from localmoe.hub.http_errors import (
    NETWORK_ERRORS,
    TransientError,
    check_status,
    public_sentence,
    sorted_error,
)
from localmoe.hub.http_sessions import hub_endpoint, hub_session
from localmoe.hub.int4_tensors import is_int4
from localmoe.hub.names import is_repo_id
from localmoe.hub.nvfp4_tensors import is_nvfp4
from localmoe.hub.remote_repo import METADATA_TIMEOUT_S, NO_SENSE, licence_of
from localmoe.hub.safetensors_header import shown
from localmoe.hub.token import hub_token

MAX_QUERY = 200  # characters
_QUANTISED_TAGS = frozenset(
    {
        "2-bit", "3-bit", "4-bit", "8-bit", "awq", "bitsandbytes", "compressed-tensors", "exl2", "exl3",
        "fp8", "gptq", "mlx", "modelopt", "mxfp4", "nvfp4",
    }
)  # fmt: skip
_TASKS = ("text-generation", "image-text-to-text", "any-to-any")  # of the last two, the text part can run
_CLASSES = ("model_type", "architectures", "auto_map")
_NONSENSE = "The Hub's answer to the search makes no sense: try again later."
# of which 16-bit weights are made when they are read, and tags that repos have besides; the Hub counts the
# bytes that they are stored in
_READ = {
    "mxfp4": frozenset({"8-bit"}),
    "nvfp4": frozenset({"4-bit", "8-bit", "fp8", "compressed-tensors", "modelopt"}),
    "fp8": frozenset({"8-bit", "compressed-tensors", "modelopt"}),
    "int4": frozenset({"4-bit", "compressed-tensors", "gptq", "awq"}),
}
_INT4_WORDS = {"w4a16", "4bit"}  # of llm-compressor's makers
_INT4_METHODS = ("compressed-tensors", "auto-round", "gptq", "awq")


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A repo as a search lists it.

    Attributes:
        architecture: the config's model_type; "" where the Hub tells none.
        num_params: all parameters; None where the Hub tells none.
        refusal: why it cannot be loaded, as far as tags tell; "" if they say nothing against it.
        config: what the Hub tells of its config, as far as it names classes.
    """

    repo_id: str
    architecture: str
    num_params: int | None
    licence: str
    gated: bool
    downloads: int
    refusal: str
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)


def search_models(query: str, limit: int = 50) -> list[SearchHit]:
    """Models that write text and whose names match, the most downloaded first; with no query, those tagged
    "moe". Asks once for each task: who searches waits, and can search again.

    Raises:
        DownloadError: the Hub cannot be asked, or refuses.
    """
    with ThreadPoolExecutor(len(_TASKS)) as pool:
        lists = list(pool.map(lambda task: _search(task, query.strip()[:MAX_QUERY], limit), _TASKS))
    hits = {hit.repo_id: hit for found in lists for hit in found}
    return sorted(hits.values(), key=lambda hit: hit.downloads, reverse=True)[:limit]


def _search(task: str, words: str, limit: int) -> list[SearchHit]:
    asked = {
        "pipeline_tag": task, "sort": "downloads", "direction": "-1", "limit": str(limit),
        "expand": ["cardData", "config", "downloads", "gated", "safetensors", "tags"],
        **({"search": words} if words else {"filter": "moe"}),
    }  # fmt: skip
    url, token = f"{hub_endpoint()}/api/models", hub_token()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    session = hub_session()
    try:
        response = session.get(url, params=asked, headers=headers, timeout=METADATA_TIMEOUT_S)
        check_status(response)
    except NETWORK_ERRORS as error:
        failure = sorted_error("The search", error)
        if isinstance(failure, TransientError):
            raise HubUnreachableError(
                f"The Hub cannot be reached ({failure}): check the connection and search again."
            ) from error
        raise failure if isinstance(failure, DownloadError) else _refused(error) from error
    try:
        found = [ModelInfo(**entry) for entry in _entries(response.content)]  # type: ignore[no-untyped-call]
        return [hit_of(info) for info in found if is_repo_id(info.id)]
    except NO_SENSE:
        raise DownloadError(_NONSENSE) from None


def _entries(raw: bytes) -> list[dict[str, Any]]:
    try:
        entries = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, list) or not all(_has_id(entry) for entry in entries):
        raise DownloadError(_NONSENSE)
    return [dict(entry) for entry in entries]


def _has_id(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), str)


def _refused(error: Exception) -> DownloadError:
    return DownloadError(f"The Hub refused the search: {public_sentence(error)}")


def hit_of(info: ModelInfo) -> SearchHit:
    """One entry of the Hub's list."""
    config: Mapping[str, Any] = info.config if isinstance(info.config, dict) else {}
    architecture = config.get("model_type")
    read, foreign = _forms(info, config)
    return SearchHit(
        repo_id=info.id,
        architecture=architecture if isinstance(architecture, str) else "",
        num_params=_num_params(info.safetensors, read),
        licence=licence_of(info),
        gated=bool(info.gated),
        downloads=int(info.downloads or 0),
        refusal=_refusal(info, config, read, foreign),
        config={key: config[key] for key in _CLASSES if key in config},
    )


def _num_params(weights: Any, read: str | None) -> int | None:
    """Of a repo's weights in a form that is read, of which the Hub counts the words or bytes."""
    if weights is None or not weights.total:
        return None
    total, stored = int(weights.total), weights.parameters
    if not isinstance(stored, dict) or sum(stored.values()) != total:
        return total
    if read == "int4":
        return int(total + 7 * stored.get("I32", 0))
    pairs = int(stored.get("U8", 0))
    if read == "nvfp4":
        return total + pairs - pairs // 8  # without their scales
    return total - pairs + pairs * 32 // 17 if read == "mxfp4" else total


def _forms(info: ModelInfo, config: Mapping[str, Any]) -> tuple[str | None, set[str]]:
    """Of the forms that are read the one that a repo's weights are in, and tags of others."""
    tags = {tag.lower() for tag in info.tags or ()}
    words = set(re.split(r"[-_./]", info.id.lower()))  # some say it nowhere else
    tags |= {"nvfp4", "fp8", "int4"} & words | ({"int4"} if words & _INT4_WORDS else set())
    read = next((name for name in _READ if _is_read(name, tags, config, _method(config))), None)
    foreign = tags & _QUANTISED_TAGS
    return read, foreign if read is None else foreign - {read, *_READ[read]}


def _method(config: Mapping[str, Any]) -> object:
    """By which weights are quantised, as the config names it."""
    said = config.get("quantization_config")
    return said.get("quant_method") if isinstance(said, dict) else None


def _refusal(info: ModelInfo, config: Mapping[str, Any], read: str | None, foreign: set[str]) -> str:
    quantised, method = config.get("quantization_config"), _method(config)
    if read is not None:
        quantised = method = None
    if quantised or foreign:
        kind = method if isinstance(method, str) else ", ".join(sorted(foreign)) or "unknown"
        return (
            f"its weights are quantised ({kind}); localmoe needs them in 16 bits, FP8, NVFP4, MXFP4 or INT4"
        )
    if info.safetensors is None and "safetensors" not in {tag.lower() for tag in info.tags or ()}:
        return "it has no safetensors weights"
    return ""


def _is_read(form: str, tags: set[str], config: Mapping[str, Any], method: object) -> bool:
    """Whether weights are in this form, by what the config says, or by tags as far as that says nothing
    else."""
    if (form == "fp8" and is_float8(config)) or (form == "nvfp4" and is_nvfp4(config)):
        return True
    if form == "int4":
        said = config.get("quantization_config")
        bits = said.get("bits") if isinstance(said, dict) else None
        four = bits == 4 or (bits is None and bool(tags & {"4-bit", "int4"}))
        known = method in _INT4_METHODS if said else bool(tags & _READ[form] - {"4-bit"})
        return is_int4(config) or (four and known)
    if not config.get("quantization_config"):
        return form in tags
    return isinstance(method, str) and (method == form == "mxfp4" or (form in tags and method in _READ[form]))


def find_repo(text: str) -> tuple[str, str | None] | None:
    """The repo id and revision that a pasted "owner/name", "owner/name@revision" or address of the Hub's
    model page names; None if the text names none (so it is words to search for).

    Raises:
        DownloadError: an address that is no model's.
    """
    words = text.strip()
    if re.match(r"https?://", words, re.IGNORECASE):
        return _from_address(words)
    repo_id, _, revision = words.partition("@")
    if "/" in repo_id and is_repo_id(repo_id):
        return repo_id, revision or None
    return None


def _from_address(address: str) -> tuple[str, str | None]:
    try:
        path = urlsplit(address).path
    except ValueError:  # brackets, or letters that stand for others, in the host's place
        path = ""
    parts = [unquote(part) for part in path.split("/") if part]
    if parts and parts[0] == "models":
        parts = parts[1:]
    repo_id = "/".join(parts[:2])
    if len(parts) < 2 or parts[0] in ("datasets", "spaces", "docs") or not is_repo_id(repo_id):
        raise DownloadError(
            f"{shown(address)} is no address of a model: paste one such as "
            "https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B-Chat."
        )
    named = len(parts) >= 4 and parts[2] in ("tree", "blob", "resolve")
    return repo_id, parts[3] if named else None
