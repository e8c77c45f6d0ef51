"""The panel, the header and the answer lines: measured numbers, true words, nothing unescaped."""

from __future__ import annotations

import re
from dataclasses import replace

import psutil
from fake_engine import FakeEngine

from app import words
from app.chat_search import Found
from app.chat_tree import MessageTree
from app.chats import Chat, ChatMessage
from app.engine_status import EngineStatus
from app.host_memory import HostMemory
from app.jobs import JobView
from app.messages import history_entries, split_turns, turn_entries
from app.panel import panel_html
from app.status_html import DEMO_NOTICE, header_html, share_html
from app.tabs.sidebar import chat_list_html
from localmoe.core.config import EngineConfig
from localmoe.core.stats import GenerationCounters
from localmoe.core.types import Progress

COUNTERS = GenerationCounters(
    prompt_tokens=12, reused_tokens=5, new_tokens=41, steps=10, drafted=40, left_out=10, accepted=31, hits=87,
    late=3, misses=10,
    routed_pairs=200, matched_pairs=150, prefill_h2d_bytes=1 << 20, decode_h2d_bytes=40 * 1024, ttft_s=0.5,
    decode_s=4.0,
    stall_s=0.02,
)  # fmt: skip
STATS = COUNTERS.freeze()
JOB = JobView("a" * 32, 1.0, 7, "text", None, "", STATS, (8.0, 10.0, 12.0))


def ready(link: float | None = None, device: str = "cpu", model: str = "demo") -> EngineStatus:
    engine = FakeEngine(model, EngineConfig(emulated_link_bytes_per_s=link))
    info = replace(engine.info(), device=device)
    return EngineStatus(
        "ready",
        model,
        info=info,
        plan=engine.plan,
        footprint=engine.footprint,
        memory={"shared": 4 << 20, "slots": 12 << 20},
    )


def fact(html: str, key: str) -> str:
    found = re.search(rf'data-key="{key}">([^<]*)<', html)
    assert found is not None, key
    return found.group(1)


def test_a_draft_that_is_laid_aside_is_said_in_header_and_panel() -> None:
    status = ready()
    assert status.plan is not None
    assert "laid aside" not in header_html(status) + panel_html(status, JOB)
    aside = replace(status, plan=replace(status.plan, draft_aside=True, draft_bytes=0))
    assert "draft laid aside" in header_html(aside) and "drafting on" not in header_html(aside)
    assert "A fixed draft length brings it back." in panel_html(aside, JOB)


def test_experts_of_the_cpu_have_a_line_where_there_is_such_a_lane() -> None:
    assert "CPU" not in panel_html(ready(), JOB).split("Drafting")[0]
    counters = replace(COUNTERS, computed=1234, cpu_jobs=9, cpu_bytes=3 << 20)
    html = panel_html(ready(), replace(JOB, stats=counters.freeze()))
    assert "computed on the CPU" in html and "<b>1,234</b>" in html
    assert fact(html, "cpu_bytes") == "3.0 MiB" and fact(html, "hit_rate") == "7 %"


def test_the_panel_shows_what_was_measured() -> None:
    html = panel_html(ready(), JOB)
    assert fact(html, "tokens_per_s") == "10.0"
    assert fact(html, "ttft") == "0.50 s"
    assert fact(html, "hit_rate") == "87 %"
    assert fact(html, "acceptance") == "78 %"
    assert fact(html, "draft_length") == "4.0" and fact(html, "draft_length_now") == "—"
    assert fact(html, "left_out") == "20 %"
    moving = panel_html(ready(), replace(JOB, draft_length=5.5))
    assert fact(moving, "draft_length_now") == "6"
    ended = panel_html(ready(), replace(JOB, draft_length=5.5, finish="stop"))
    assert fact(ended, "draft_length_now") == "—"
    assert fact(html, "expert_match") == "75 %"
    assert fact(html, "memory") == "16.0 MiB of 32.0 MiB"
    assert "kept free for activations</span><b>2.0 MiB</b>" in html
    assert fact(html, "h2d") == "1.0 MiB"
    assert fact(html, "h2d_token") == "1.0 KiB"
    assert fact(html, "prompt") == "12 (5 reused)"
    for count in ("87", "3", "10"):
        assert f"<b>{count}</b>" in html
    assert html.count("<polyline") == 1 and "answering" in html


def test_the_ram_of_this_program_and_of_others_stands_beside_all_of_it() -> None:
    assert 'data-card="ram"' not in panel_html(ready(), JOB)
    html = panel_html(replace(ready(), ram=HostMemory(6 << 30, 2 << 30, 32 << 30)), JOB)
    assert fact(html, "ram") == "8.0 GiB of 32.0 GiB" and "<b>6.0 GiB</b>" in html
    assert "width:18.75%" in html and "width:6.25%" in html
    now = HostMemory.now()
    assert 0 < now.own < now.total and now.own + now.others <= now.total + (32 << 20)
    assert now.own >= psutil.Process().memory_info().rss - (64 << 20)


def test_what_was_not_measured_is_a_dash_and_not_a_number() -> None:
    html = panel_html(ready(), None)
    for key in (
        "tokens_per_s",
        "ttft",
        "hit_rate",
        "acceptance",
        "draft_length",
        "left_out",
        "expert_match",
        "h2d",
        "h2d_token",
    ):
        assert fact(html, key) == "—"
    one_token = GenerationCounters(prompt_tokens=3, new_tokens=1).freeze()
    html = panel_html(ready(), replace(JOB, stats=one_token, speeds=()))
    assert fact(html, "tokens_per_s") == fact(html, "acceptance") == "—"
    assert "nan" not in html.lower() and "inf" not in html.lower() and "<polyline" not in html


def test_bars_never_leave_their_frame() -> None:
    for html in (panel_html(ready(), JOB), panel_html(ready(), None), panel_html(EngineStatus(), None)):
        for bar in re.findall(r'<div class="lm-bar".*?</div>', html):
            assert sum(float(width) for width in re.findall(r"width:([0-9.]+)%", bar)) <= 100.1


def test_an_emulated_link_is_always_called_one() -> None:
    emulated, plain = ready(link=2e9), ready()
    assert "emulated link, 2.0 GB/s" in panel_html(emulated, JOB)
    assert "emulated link, 2.0 GB/s" in share_html(emulated)
    assert "emulated link" in words.answer_line({**STATS.as_dict(), "link": "emulated 2.0 GB/s"}, "stop")
    assert "emulated link" not in panel_html(plain, JOB) + share_html(plain)


def test_memory_on_a_cpu_is_called_emulated_and_on_a_gpu_is_not() -> None:
    assert "Emulated device memory" in panel_html(ready(), JOB)
    gpu = ready(device="cuda: NVIDIA GeForce RTX 4090")
    assert "mulated" not in panel_html(gpu, JOB)
    assert "49 % of the experts stay in VRAM (576 of 1,184)" in share_html(gpu)
    assert "49 % of the experts stay in emulated device memory (576 of 1,184)" in share_html(ready())


def test_the_header_says_how_far_the_load_is_and_what_went_wrong() -> None:
    loading = EngineStatus("loading", "m", Progress("building the draft", 300, 1184, "experts"))
    assert "building the draft: 300 of 1,184 experts (25 %)" in header_html(loading)
    assert 'aria-valuenow="25"' in header_html(loading)
    weights = EngineStatus("loading", "m", Progress("loading weights", 1 << 30, 4 << 30, "bytes"))
    assert "loading weights: 1.0 GiB of 4.0 GiB (25 %)" in header_html(weights)
    assert "x: 0 of 0 files (0 %)" in header_html(EngineStatus("loading", "m", Progress("x", 0, 0, "files")))
    failed = header_html(EngineStatus("error", "m", error="It does not fit."))
    assert 'role="alert"' in failed and "It does not fit." in failed and "Settings" in failed


def test_a_long_build_says_how_long_it_will_take_and_how_good_the_draft_is() -> None:
    report = Progress("Building", 296, 1184, "experts", 4800.0, "output error 60 % of rounding to nearest")
    expected = (
        "Building: 296 of 1,184 experts (25 %, about 1 h 20 min left); "
        "output error 60 % of rounding to nearest"
    )
    assert words.progress(report) == (expected, 0.25)
    assert expected in header_html(EngineStatus("loading", "m", report))
    bare = replace(report, seconds_left=None, detail="")
    assert words.progress(bare)[0] == "Building: 296 of 1,184 experts (25 %)"


def test_the_demo_model_is_called_a_toy_and_others_are_not() -> None:
    assert DEMO_NOTICE in header_html(ready())
    assert DEMO_NOTICE not in header_html(ready(model="other"))


def test_the_line_under_an_answer() -> None:
    line = words.answer_line(STATS.as_dict(), "stop")
    assert line == "10.0 tok/s · 41 tokens · first token 0.50 s · hits 87 % · accepted 78 %"
    assert words.answer_line(STATS.as_dict(), "cancelled").endswith(" · stopped")
    assert words.answer_line(STATS.as_dict(), None).endswith(" · interrupted")
    assert words.answer_line({}, "cancelled") == "stopped before the first token"
    assert "accepted" not in words.answer_line({**STATS.as_dict(), "drafted": 0}, "stop")


def test_names_and_titles_are_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>\"'"
    chat = Chat("a" * 32, evil, 0, 0)
    status = EngineStatus("error", evil, error=evil)
    for html in (
        chat_list_html([Found(chat, evil)], chat.id),
        header_html(status),
        share_html(status),
        header_html(EngineStatus("loading", evil)),
    ):
        assert "<img" not in html and 'onerror=alert(1)>"' not in html
        assert "&lt;img" in html or evil not in html


def test_the_text_of_a_message_is_passed_on_untouched_and_its_error_is_escaped() -> None:
    code = "```\n  <b>indented</b>\n"
    answer = ChatMessage("assistant", code, finish="error", error="bad <b>thing</b>", stats=STATS.as_dict())
    (entry,) = history_entries([answer])
    texts = [part["text"] for part in entry["content"]]
    assert texts[0] == code
    assert "bad &lt;b&gt;thing&lt;/b&gt;" in texts[1] and "tok/s" in texts[2]


def test_only_the_last_turn_is_drawn_again() -> None:
    messages = tuple(
        ChatMessage(role, str(i), finish="stop") for i, role in enumerate(("user", "assistant") * 3)
    )
    chat = Chat("a" * 32, "t", 0, 0, MessageTree.line(messages))
    history, turn = split_turns(chat)
    assert [m.content for m in history] == list("0123") and [m.content for m in turn] == list("45")
    running = turn_entries(turn, replace(JOB, text="so far"))
    assert [part["text"] for entry in running for part in entry["content"]] == ["4", "so far"]
    unanswered = turn_entries(turn[:1], None)
    assert [entry["role"] for entry in unanswered] == ["user", "assistant"]
    assert "Retry" in unanswered[1]["content"][0]["text"]
    assert split_turns(None) == ((), ()) and split_turns(replace(chat, tree=MessageTree())) == ((), ())
