"""The Settings tab in a real browser: what it keeps, also when settings change in another tab or window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from app_process import LOOKING, AppStart, Server, wait_for
from browser import PageDriver

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("on_a_new_chat")]
OWN_SAMPLING = "#lm-own-sampling input"


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    return AppStart(environment=LOOKING)


def kept(server: Server, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((server.home / "settings.json").read_text())[kind]
    return found


def wait_value(page: PageDriver, elem_id: str, text: str) -> None:
    wait_for(lambda: page.value(elem_id) == text, 10, f"{text} in {elem_id}")


def load_folder(page: PageDriver, server: Server, folder: Path) -> None:
    page.page.bring_to_front()
    page.open_tab("models")
    page.wait_text("#lm-shelf", "On this computer")
    page.page.wait_for_timeout(500)  # Gradio may empty a box once that has just come into sight
    page.fill("lm-folder", str(folder))
    page.page.click("#lm-open-folder")
    wait_for(lambda: server.health()["model"] == str(folder), 15, "the folder's model")
    server.wait("ready")
    page.page.wait_for_selector("#lm-tab-chat-button[aria-selected=true]")  # where the load leads


@pytest.mark.slow
def test_the_form_follows_what_is_loaded_elsewhere_and_keeps_what_is_typed(
    page: PageDriver, server: Server, tiny16: Any
) -> None:
    folder = tiny16("qwen3_moe")
    other = page.another(server.url)
    other.settings()
    other.fill("lm-context", "512")  # and not applied yet
    load_folder(page, server, folder)
    page.settings()
    wait_value(page, "lm-model", str(folder))
    wait_value(other, "lm-model", str(folder))
    assert other.value("lm-context") == "512" and page.value("lm-context") == "auto"
    page.fill("lm-budget", "24MiB")
    page.fill("lm-context", "256")
    page.apply("")
    server.wait("ready")
    wait_value(other, "lm-budget", "24MiB")
    assert other.value("lm-context") == "512", "its own user is changing it"
    wait_for(lambda: not other.page.is_checked("#lm-automatic input"), 10, "the switch to follow")
    assert server.health()["model"] == str(folder), "Apply says nothing of the model"
    other.apply("")
    wait_for(lambda: kept(server, "load")["context"] == "512", 10, "what was typed in the other window")
    assert (kept(server, "load")["model"], kept(server, "load")["vram_budget"]) == (str(folder), "24MiB")
    wait_value(page, "lm-context", "512")
    page.choose_model("demo")
    page.fill("lm-budget", "auto")
    page.fill("lm-context", "auto")
    page.apply("")
    wait_for(lambda: kept(server, "load")["model"] == "demo", 15, "the model of before")
    wait_value(other, "lm-model", "demo (31.0 MiB)")
    other.close()


@pytest.mark.slow
def test_two_windows_change_settings_of_answers_and_undo_nothing_of_each_other(
    page: PageDriver, server: Server
) -> None:
    other = page.another(server.url)
    page.settings()
    other.settings()
    other.page.locator("#lm-system textarea").type("Be br")  # is still typing
    page.fill("lm-temperature", "1.25")
    page.page.click("#lm-thinking input")
    page.page.click("#lm-thinking [role=option]:has-text('Low effort')")
    wait_for(lambda: kept(server, "answers")["thinking"] == "low", 10, "what the first window says")
    wait_value(other, "lm-temperature", "1.25")
    wait_value(other, "lm-thinking", page.value("lm-thinking"))
    wait_for(lambda: not other.page.is_checked("#lm-own-sampling input"), 10, "the switch to follow")
    assert other.page.input_value("#lm-system textarea") == "Be br"
    other.page.locator("#lm-system textarea").type("ief.")
    other.page.keyboard.press("Tab")
    wait_for(lambda: kept(server, "answers")["system_prompt"] == "Be brief.", 10, "the prompt")
    now = kept(server, "answers")
    assert (now["temperature"], now["thinking"], now["own_sampling"]) == (1.25, "low", False)
    wait_for(lambda: page.page.input_value("#lm-system textarea") == "Be brief.", 10, "it in the first one")
    page.choose_draft("Off")
    other.page.wait_for_selector("#lm-draft input[value=off]:checked")
    other.fill("lm-seed", "7")
    wait_for(lambda: kept(server, "answers")["seed"] == 7, 10, "the seed")
    assert kept(server, "answers")["draft_length"] == 0
    page.choose_draft("Auto")
    other.close()


@pytest.mark.slow
def test_a_number_that_is_being_typed_while_the_form_follows_still_ends_own_sampling(
    page: PageDriver, server: Server
) -> None:
    other, box = page.another(server.url), "#lm-temperature input"
    page.settings()
    other.settings()
    if not other.page.is_checked("#lm-own-sampling input"):
        other.page.check("#lm-own-sampling input")
        wait_for(lambda: kept(server, "answers")["own_sampling"], 10, "the model's own sampling")
    other.page.fill(box, "0.35")  # and has not left it
    page.fill("lm-seed", "11")
    wait_value(other, "lm-seed", "11")
    assert other.page.input_value(box) == "0.35" and kept(server, "answers")["temperature"] != 0.35
    other.page.locator(box).press("Tab")
    wait_for(lambda: kept(server, "answers")["temperature"] == 0.35, 10, "the number")
    assert not kept(server, "answers")["own_sampling"]
    wait_for(lambda: not other.page.is_checked("#lm-own-sampling input"), 10, "the switch")
    other.fill("lm-seed", "")
    wait_for(lambda: kept(server, "answers")["seed"] is None, 10, "no seed")
    other.close()


@pytest.mark.slow
def test_a_refusal_is_said_where_the_button_is_and_leads_nowhere(page: PageDriver) -> None:
    page.settings()
    page.fill("lm-budget", "1MiB")  # this computer is not measured while an answer is written
    page.page.wait_for_selector("#lm-preview [data-act=use-budget]", timeout=60_000)
    page.chat()
    page.send("tell me a long story")
    page.settings()
    page.page.click("#lm-preview [data-act=use-budget]")
    page.wait_text("#lm-applied", "An answer is being written")
    assert page.page.is_visible("#lm-apply") and "answer" not in page.text("#lm-models-notice")
    page.chat()
    page.stop()
    page.settings()
    page.page.wait_for_selector("#lm-preview [data-act=use-budget]", state="detached")  # the form says it
    page.fill("lm-budget", "1MiB")
    page.page.click("#lm-preview [data-act=use-budget]")
    page.wait_text("#lm-applied", "Applied")
    assert page.page.is_visible("#lm-apply"), "what needs no load leads nowhere else"
    page.fill("lm-budget", "auto")
    page.apply("32.0 MiB")
    page.chat()
    button = '<button data-act="of-an-older-page" data-key="1">Old</button>'
    page.page.evaluate(
        "html => document.querySelector('#lm-header .lm-head').insertAdjacentHTML('beforeend', html)", button
    )
    page.page.click("#lm-header [data-act=of-an-older-page]")
    page.wait_text("#lm-said", "This button is of an older page")
    assert page.page.is_visible("#lm-said .lm-alert")


@pytest.mark.slow
def test_who_drafts_is_chosen_beside_the_other_fields_of_the_draft(page: PageDriver, server: Server) -> None:
    page.settings()
    page.page.click("#lm-drafter label:has-text('its MTP layer')")
    page.apply("")
    page.wait_text("#lm-share", "its MTP layer, in INT4")
    file = server.home / "settings.json"
    wait_for(lambda: file.exists() and kept(server, "load")["drafter"] == "mtp", 10, "what was loaded")
    page.chat()


@pytest.mark.slow
def test_a_preset_takes_the_place_of_a_prompt_only_when_it_is_chosen(
    page: PageDriver, server: Server
) -> None:
    field, prompt = "#lm-preset-prompt input", "#lm-system textarea"
    page.settings()
    page.fill("lm-system", "Translate.")
    page.page.fill(field, "German translator")
    page.page.keyboard.press("Enter")
    page.page.click("#lm-save-prompt")
    page.wait_text("#lm-said-prompt", "saved")
    page.fill("lm-system", "Be brief.")
    page.page.focus(field)
    page.page.keyboard.press("Tab")  # past it
    page.page.fill(field, "")
    page.page.keyboard.type("German")  # the name of a new one, which the other one's holds
    page.page.keyboard.press("Enter")
    page.page.click("#lm-save-prompt")
    presets = server.home / "presets.json"
    wait_for(lambda: '"German"' in presets.read_text(), 10, "the second preset")
    assert (page.page.input_value(field), page.page.input_value(prompt)) == ("German", "Be brief.")
    for chosen in ("German translator", "German"):
        page.page.click(field)
        page.page.click(f"#lm-preset-prompt [role=option][aria-label='{chosen}']")
        expected = "Translate." if "translator" in chosen else "Be brief."
        wait_for(lambda text=expected: page.page.input_value(prompt) == text, 10, expected)
    page.fill("lm-system", "Be very brief.")
    page.page.click(field)
    page.page.keyboard.press("Enter")  # the same once more
    wait_for(lambda: page.page.input_value(prompt) == "Be brief.", 10, "the preset's prompt")
    page.fill("lm-system", "")


@pytest.mark.slow
def test_a_budget_of_one_s_own_begins_with_one_that_works(page: PageDriver) -> None:
    """Also before this computer has been looked at, when the slider has no ends: it stays automatic."""
    page.reload()
    page.settings()
    automatic = "#lm-automatic input"
    page.page.click(automatic)  # at once
    wait_for(lambda: page.value("lm-budget") != "auto" or page.page.is_checked(automatic), 15)
    size = page.value("lm-budget")
    assert size == "auto" or int(size.removesuffix("MiB")) >= 8, size
    page.fill("lm-budget", "auto")
    wait_for(lambda: "(predicted)" in page.text("#lm-preview"), 60, "the planner's words")
    wait_for(lambda: page.page.is_checked(automatic), 15, "the switch to follow")
    page.page.click(automatic)  # now that they are there
    wait_for(lambda: page.value("lm-budget") != "auto", 15, "a size")
    assert int(page.value("lm-budget").removesuffix("MiB")) >= 8
    page.fill("lm-budget", "auto")
    wait_for(lambda: page.page.is_checked(automatic), 15, "the switch to follow")
    assert not page.page.is_visible("#lm-budget-slider input[type=number]")


@pytest.mark.slow
def test_own_sampling_holds_until_a_number_or_a_preset_of_ones_own(page: PageDriver, server: Server) -> None:
    """However quickly a control is left for another one."""

    def kept() -> tuple[float, bool, int | None]:
        answers = json.loads((server.home / "settings.json").read_text())["answers"]
        return answers["temperature"], answers["own_sampling"], answers["seed"]

    def own(wanted: bool) -> None:
        wait_for(lambda: page.page.is_checked(OWN_SAMPLING) == wanted, 5, f"own sampling {wanted}")

    page.settings()
    page.fill("lm-temperature", "0.5")
    page.fill("lm-preset-sampling", "warm")
    page.page.click("#lm-save-sampling")
    page.wait_text("#lm-said-sampling", "The preset is saved.")
    page.page.check(OWN_SAMPLING)
    wait_for(lambda: kept() == (0.5, True, None), 10, "it to be kept")
    page.fill("lm-seed", "7")
    wait_for(lambda: kept() == (0.5, True, 7), 10, "a seed, which changes nothing of it")
    page.fill("lm-temperature", "0.75")
    page.fill("lm-seed", "")  # at once
    wait_for(lambda: kept() == (0.75, False, None), 10, "the number")
    own(False)
    page.page.check(OWN_SAMPLING)
    wait_for(lambda: kept() == (0.75, True, None), 10, "it to be kept")
    page.reload()
    page.settings()
    own(True)
    page.page.click("#lm-preset-sampling input")
    page.page.click("#lm-preset-sampling [role=option]:has-text('warm')")
    wait_for(lambda: kept() == (0.5, False, None), 10, "the preset")
    own(False)
    page.fill("lm-seed", "8")
    wait_for(lambda: kept() == (0.5, False, 8), 10, "the preset still")
    page.fill("lm-seed", "")


@pytest.mark.slow
def test_a_model_that_is_not_there_can_be_changed_again(page: PageDriver) -> None:
    page.settings()
    page.choose_model("missing")
    page.apply("")
    page.wait_text("#lm-header", "There is no model 'missing'")
    page.chat()
    page.type("hello")
    page.wait_text("#lm-notice", "No model is loaded")
    assert page.value("lm-message") == "hello"
    page.settings()
    page.choose_model("other-moe")
    page.apply("")
    page.wait_text("#lm-header", "ready")
    assert "tiny demo model" not in page.text("#lm-header")
    page.chat()
    wait_for(lambda: page.text("#lm-notice") == "", 10, "a model is loaded")
    page.settings()
    page.wait_text("#lm-own", "temperature 1, top-k 64, top-p 0.95")
    page.choose_model("demo")
    page.apply("")
    page.wait_text("#lm-header", "a tiny demo model; choose a real one under Models")
