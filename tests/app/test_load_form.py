"""What the form of a load shows once settings were changed elsewhere, and what Apply means then."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.service import ChatService
from app.settings import LoadSettings
from app.tabs.form_memory import FormMemory
from app.tabs.load_form import (
    LoadForm,
    changed_names,
    chosen_settings,
    edited_settings,
    followed_load,
    load_values,
)

BEFORE = LoadSettings("demo")
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(("demo", "other")), "vram_budget": st.sampled_from(("auto", "32MiB")),
        "context": st.sampled_from(("auto", "256", "512")), "lanes": st.sampled_from(("auto", "all")),
        "better_draft": st.sampled_from(("on", "off")), "draft_bits": st.sampled_from(("4", "8")),
        "cpu_threads": st.sampled_from(("auto", "2")), "emulated_link": st.sampled_from(("", "2GB/s")),
        "drafter": st.sampled_from(("auto", "self", "mtp")), "experts_on": st.sampled_from(("ram", "disk")),
        "ram_budget": st.sampled_from(("auto", "32MiB")),
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def form() -> LoadForm:
    """Something in the place of each widget."""
    return LoadForm(**{field.name: cast(Any, object()) for field in fields(LoadForm)})


def choices_of(load: LoadSettings) -> list[Any]:
    """What the form says that shows these."""
    return [
        load.model, load.vram_budget, load.context, load.emulated_link, load.better_draft == "on",
        load.draft_bits, load.lanes, load.cpu_threads, load.drafter, load.experts_on, load.ram_budget,
    ]  # fmt: skip


class Holder:
    """A service of which only the settings count here."""

    def __init__(self, load: LoadSettings) -> None:
        self.load_settings = load
        self.list_models = lambda: [("demo", "demo"), ("other", "other")]


@settings(max_examples=100)
@given(known=CHANGES, now=CHANGES, mine=CHANGES)
def test_it_follows_all_but_what_its_user_is_changing(
    known: dict[str, str], now: dict[str, str], mine: dict[str, str], form: LoadForm
) -> None:
    before, after = replace(BEFORE, **known), replace(BEFORE, **now)
    said = replace(before, **mine)
    memory, service = FormMemory(before), cast(Any, Holder(after))
    updates = followed_load(form, service, memory, choices_of(said))
    own = changed_names(before, said)
    followed = {name for name, widget in form.named().items() if widget in updates}
    assert followed == set(changed_names(before, after)) - set(own)
    assert memory.known == after
    shown = replace(said, **{name: getattr(after, name) for name in followed})
    meant = edited_settings(after, chosen_settings(after, *choices_of(shown)), memory.known)
    for name in form.named():
        assert getattr(meant, name) == getattr(said if name in own else after, name), name


def test_a_ready_made_draft_goes_with_its_model_and_when_the_mtp_layer_is_to_draft() -> None:
    ready_made = replace(BEFORE, draft="/drafts/gptq")
    same, layer = replace(BEFORE, context="512"), replace(BEFORE, drafter="mtp")
    for shown, draft in ((same, "/drafts/gptq"), (layer, ""), (replace(BEFORE, model="other"), "")):
        said = chosen_settings(ready_made, *choices_of(shown))
        meant = edited_settings(ready_made, shown, BEFORE)
        assert said == meant == replace(shown, draft=draft)


def test_a_page_whose_memory_is_gone_is_filled_in_anew(form: LoadForm, service: ChatService) -> None:
    updates = followed_load(form, service, None, choices_of(BEFORE))
    assert set(form.named().values()) < set(updates) and set(updates) == set(load_values(form, service))
    assert updates[form.memory].known == service.load_settings
