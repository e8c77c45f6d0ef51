"""The Hub's token: who may read it, which one is used, and that it is never shown whole."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from support.hub_home import REPO, hub_and_home, pull, small_model
from support.hub_server import TOKEN, HubServer

from localmoe.core.errors import ConfigError, GatedModelError
from localmoe.hub.token import forget_token, hub_token, save_token, token_hint, token_path


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_and_home(tmp_path) as server:
        yield server


def test_a_kept_token_is_the_users_alone_and_shown_by_its_end(hub: HubServer, tmp_path: Path) -> None:
    assert hub_token() is None and token_hint() == ""
    save_token(f"  {TOKEN}\n")
    assert hub_token() == TOKEN == token_path().read_text()
    assert stat.S_IMODE(token_path().stat().st_mode) == 0o600
    assert token_hint() == f"localmoe …{TOKEN[-4:]}"
    save_token("hf_another_one")
    assert hub_token() == "hf_another_one" and [path.name for path in tmp_path.iterdir()] == ["hub-token"]
    forget_token()
    forget_token()
    assert hub_token() is None


@pytest.mark.parametrize("saved", [True, False])
def test_what_a_kill_left_of_a_token_is_gone_with_the_next_one_and_when_it_is_forgotten(
    saved: bool, hub: HubServer, tmp_path: Path
) -> None:
    left, other = tmp_path / ".hub-token.0123abcd.tmp", tmp_path / ".notes.tmp"
    left.write_text(TOKEN)
    other.write_text("a user's own")
    if saved:
        save_token("hf_another_one")
    else:
        forget_token()
    assert not left.exists() and other.exists()


def test_the_environment_goes_before_it_and_the_librarys_own_after_it(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "library-token"
    own.write_text("hf_of_the_library")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(own))
    assert token_hint().startswith("huggingface_hub …")
    save_token("hf_of_localmoe")
    assert hub_token() == "hf_of_localmoe"
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    assert hub_token() == "hf_of_the_environment" and token_hint() == "environment …ment"


@pytest.mark.parametrize(
    "text", ["", "short", "two words_of_it", "x" * 201, "hf_\nInjected: header", "hf_ünïcode"]
)
def test_what_is_no_token_is_refused_and_not_repeated(hub: HubServer, text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        save_token(text)
    assert text == "" or text not in str(refusal.value)
    assert not token_path().exists()


@pytest.mark.parametrize("token", ["hf_abc…xyz1234", "hf_ünïcode", "two words_of_it"])
def test_what_the_environment_or_the_library_has_is_held_to_it_too(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    hub.commit(REPO, small_model())
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match="What HF_TOKEN says is no access token") as refusal:
        pull()
    assert token not in str(refusal.value)
    monkeypatch.setenv("HF_TOKEN", "hf_oauth_" + 900 * "x")
    assert hub_token() == "hf_oauth_" + 900 * "x", "those of others may be long"
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "library-token").write_text(token, encoding="utf-8")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "library-token"))
    with pytest.raises(ConfigError, match="library-token holds"):
        hub_token()


def test_a_damaged_file_counts_as_none(hub: HubServer) -> None:
    token_path().write_bytes(b"\xff\xfe" * 9)
    assert hub_token() is None


def test_a_gated_model_is_refused_by_its_own_class_and_comes_with_the_token(hub: HubServer) -> None:
    hub.commit(REPO, small_model())
    hub.repos[REPO].gated = True
    with pytest.raises(GatedModelError, match="ask for access"):
        pull()
    save_token("hf_of_somebody_else")
    with pytest.raises(GatedModelError, match="your token has no access"):
        pull()
    save_token(TOKEN)
    assert (pull() / "config.json").is_file()
    assert {one.token for one in hub.requests if one.server == "cdn"} == {None}  # it is the Hub's alone
