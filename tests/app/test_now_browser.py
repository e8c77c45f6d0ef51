"""What an open page learns by itself, in a real browser on the fake engine: its script asks little of the
server, mends what is out of date, and counts what is typed."""

from __future__ import annotations

import json
import time
import urllib.request
from itertools import pairwise
from typing import Any

import psutil
import pytest
from app_process import LOOKING, AppStart, Server, wait_for
from browser import PageDriver
from fake_engine import answer_to

from app.models_screen import STILL_S

pytestmark = [pytest.mark.browser, pytest.mark.slow]
MARK = "document.querySelector('#lm-mark [data-epoch]').dataset"
PREDICT = "**/gradio_api/run/predict*"


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    return AppStart(environment={**LOOKING, "FAKE_STEP_S": "0.06"})


def asked(page: PageDriver, address: str) -> int:
    page.evaluate("0")  # so that what was answered meanwhile is counted
    return sum(address in url for url in page.answered)


def rests(page: PageDriver) -> None:
    """Until Gradio has been asked nothing for longer than the Models tab's timer waits, which runs until the
    first start's proposals stand."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < STILL_S + 0.5:
        if (now := asked(page, "/run/predict")) != last:
            last, since = now, time.monotonic()
        time.sleep(0.1)


def cpu_s(server: Server) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


def test_a_page_costs_the_server_little_while_an_answer_is_written_and_less_while_none_is(
    page: PageDriver, server: Server
) -> None:
    """All panels are open. Asking Gradio five times a second takes 6 % of a core, its queue another 6 %."""
    wait_for(lambda: (server.home / "hardware.json").exists(), 60, "the machine's rates, measured once")
    page.page.click("[data-timeline] summary")
    page.send("tell me a long story")
    page.wait_answer(100)
    rests(page)
    shares: dict[str, float] = {}
    for what in ("answering", "idle"):
        polls, gradio = asked(page, "/now?"), asked(page, "/run/predict")
        before, began = cpu_s(server), time.monotonic()
        time.sleep(3.0)
        shares[what] = (cpu_s(server) - before) / (time.monotonic() - began)
        polls, gradio = asked(page, "/now?") - polls, asked(page, "/run/predict") - gradio
        assert gradio == 0 and (polls <= 16 if what == "answering" else polls <= 3), (what, polls, gradio)
        if what == "answering":
            assert page.page.query_selector("#lm-stop") is not None, "the answer ended too early"
            page.stop()
            page.page.click("[data-timeline] summary")
            time.sleep(1.0)  # the refresh at the end of an answer
    print(shares)
    assert shares["answering"] < 0.05 and shares["idle"] < 0.02, shares


FRAMES = """(() => {
    const ask = window.requestAnimationFrame.bind(window);
    window.calls = 0;
    window.requestAnimationFrame = (call) => { window.calls += 1; return ask(call); };
    window.callsPerSecond = () => new Promise((done) => {
        const calls = window.calls, began = performance.now();
        let left = 60;
        const rate = () => 1000 * (window.calls - calls) / (performance.now() - began);
        const frame = () => { left -= 1; left ? ask(frame) : done(rate()); };
        ask(frame);
    });
})()"""


def test_no_use_of_the_page_leaves_work_behind_that_goes_on_with_every_frame(
    server: Server, browser: Any
) -> None:
    """Gradio's progress clock of a widget that leaves the page while its listener runs goes on for ever, and
    one is left behind when it has loaded the page."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.add_init_script(FRAMES)
    page = PageDriver(context.new_page())
    page.page.goto(server.url)
    page.wait_text("#lm-header", "ready")

    for question in ("hello", "hello again"):
        page.send(question)
        page.wait_answer_is(answer_to(question))
        page.wait_idle()
        page.send("one more")
        page.wait_idle()
        page.page.click("#lm-new")
        page.wait_questions([])
    page.settings()
    for label in ("Fixed", "Auto", "Fixed", "Auto"):
        page.choose_draft(label)
    time.sleep(3.0)  # what follows the last action is over, and what goes on is known for a clock
    calls = min(float(page.evaluate("window.callsPerSecond()")) for _ in range(2))
    assert calls < 8, calls  # of 60
    page.close()


CHAINS = """(length) => new Promise((done) => {
    const cancelled = requestAnimationFrame(() => { window.wrong = true; });
    cancelAnimationFrame(cancelled);
    const began = performance.now(), times = [];
    const frame = (time) => {
        times.push(performance.now() - began);
        if (times.length < length) return requestAnimationFrame(frame);
        const late = requestAnimationFrame(() => { window.wrong = true; }); // after the pause
        cancelAnimationFrame(late);
        setTimeout(() => done([times, window.wrong === true, late]), 700);
    };
    requestAnimationFrame(frame);
})"""


def test_an_animation_gets_every_frame_and_a_clock_a_few_a_second(page: PageDriver) -> None:
    times, wrong, late = page.page.evaluate(CHAINS, 124)
    steps = [later - earlier for earlier, later in pairwise(times)]
    assert sorted(steps[:118])[100] < 100  # the machine may be busy
    assert all(240 < step < 2000 for step in steps[-4:]), steps[-6:]
    assert late < 0 and not wrong
    again, wrong, late = page.page.evaluate(CHAINS, 10)  # another one is not taken for the first
    assert again[-1] < 1500 and late > 0 and not wrong


CLONES = """() => {
    const date = new Date(5), map = new Map([[1, {deep: [1, 'two']}]]), buffer = new ArrayBuffer(8);
    const same = ['text', '', 1, -0, NaN, 3n, true, null, undefined].every(
        (one) => Object.is(one, structuredClone(one)));
    const given = {date, map, list: [undefined, null, 's']}, got = structuredClone(given);
    const moved = structuredClone('text', {transfer: [buffer]});
    const refusal = (...what) => {
        try { structuredClone(...what); return 'none'; } catch (error) { return error.name; }
    };
    return {
        same, deep: got.map.get(1).deep, own: got !== given && got.map !== map && got.date !== date,
        date: got.date.getTime(), list: got.list.length, moved, left: buffer.byteLength,
        refused: [() => 1, class {}, Symbol('s'), {f() {}}, [Symbol.iterator]].map((one) => refusal(one)),
        none: refusal(),
    };
}"""


def test_clones_are_those_of_the_browser(page: PageDriver) -> None:
    got = page.evaluate(CLONES)
    assert got == {
        "same": True, "deep": [1, "two"], "own": True, "date": 5, "list": 3, "moved": "text", "left": 0,
        "refused": ["DataCloneError"] * 5, "none": "TypeError",
    }  # fmt: skip


def number_of(event: str, server: Server) -> int:
    """Of the listener of an event of the page's script."""
    with urllib.request.urlopen(f"{server.url}config") as answer:
        listeners = json.load(answer)["dependencies"]
    return next(int(one["id"]) for one in listeners if any(name == event for _, name in one["targets"]))


def test_an_overtaken_answer_of_the_server_is_mended(page: PageDriver, server: Server) -> None:
    """The refresh at an answer's end comes late, when the user is in a new chat already."""
    due = number_of("due", server)
    page.start_again()
    page.send("hello, and tell me something")
    held: list[Any] = []

    def hold(route: Any) -> None:
        if held or route.request.post_data_json["fn_index"] != due:
            route.continue_()
        else:
            held.append((route, route.fetch()))

    page.page.route(PREDICT, hold)
    wait_for(lambda: page.evaluate("0") == 0 and held, 10, "the refresh")
    page.page.click("#lm-new")
    page.wait_questions([])
    route, late = held[0]
    before = asked(page, "/run/predict")
    route.fulfill(response=late)
    page.page.unroute(PREDICT)
    wait_for(lambda: asked(page, "/run/predict") >= before + 2, 10, "another refresh")
    page.wait_questions([])
    page.page.wait_for_timeout(300)
    assert page.questions() == [] and page.evaluate(MARK + ".chat") == ""


LATE = """() => {
    const grown = window.localmoeGrown;
    window.localmoeGrown = async (seen, turn) => {
        const painted = grown(seen, turn);
        await new Promise((done) => setTimeout(done, 400));
        return painted;
    };
}"""


def test_text_that_is_painted_too_late_does_not_stay(page: PageDriver) -> None:
    """Each painting takes so long that the answer's last ones come into the finished turn."""
    page.start_again()
    page.page.evaluate(LATE)
    for question in ("show me markdown", "attack", "show me markdown again"):
        page.send(question)
        page.wait_idle()
        page.wait_text("#lm-turn .lm-line", "accepted")
        time.sleep(0.6)
        assert "accepted" in page.line()
    page.reload()


def test_a_page_that_the_server_does_not_know_opens_its_chat_again(page: PageDriver) -> None:
    page.start_again()
    page.send("hello")
    page.wait_answer_is(answer_to("hello"))
    page.wait_idle()
    page.evaluate(MARK + ".stamp = 0")  # as it comes with the view of a session that was forgotten
    wait_for(lambda: int(page.evaluate(MARK + ".stamp")) > 0, 10, "the page opened again")
    assert page.questions() == ["hello"] and page.answer() == answer_to("hello")


def test_a_change_of_the_buttons_that_was_lost_is_made_again(page: PageDriver) -> None:
    """As Gradio loses one of a button that it is just putting in."""
    shown, hidden = ({"visible": visible, "__type__": "update"} for visible in (True, False))
    lost: list[int] = []

    def lose(route: Any) -> None:
        answer = route.fetch()
        told = answer.json()
        for i, pair in enumerate(pairwise(told["data"])):
            if not lost and pair == (shown, hidden):  # Send comes back, Stop goes
                told["data"][i] = told["data"][i + 1] = {"__type__": "update"}
                lost.append(i)
        route.fulfill(response=answer, json=told)

    page.start_again()
    page.page.route(PREDICT, lose)
    page.send("hello")
    wait_for(lambda: page.evaluate("0") == 0 and lost, 20, "an answer whose end the buttons do not learn")
    page.page.unroute(PREDICT)
    page.wait_idle()
    wait_for(lambda: page.page.query_selector("#lm-send") is not None, 10, "Send")


def test_what_is_being_typed_counts_in_the_context_meter(page: PageDriver) -> None:
    page.start_again()
    page.page.fill("#lm-message textarea", "one two three")
    page.wait_text("#lm-meter", "3 of 4,096 tokens used, with 3 of your message; 4,093 are left")
    page.page.fill("#lm-message textarea", "word " * 4090)
    page.wait_text("#lm-meter", "Your message is too long: 4,096 of 4,096 tokens are left for it")
    page.page.fill("#lm-message textarea", "")
    wait_for(lambda: page.text("#lm-meter") == "", 10, "no meter in an empty chat")
    page.send("hello")
    page.wait_idle()
    page.wait_text("#lm-meter", "tokens used; ")
