"""The page at `/`, in a headless browser: a run to its end, a cancel, errors, a narrow screen.

Where there is no browser they are skipped; TEST_BROWSER=required, as CI has it, fails instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from urllib.parse import parse_qs

import pytest

from paceline import errors
from paceline_gateway.page import live_stream
from support.browser import BROWSER, browsing
from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over
from support.processes import GatewayProcess, running
from support.system import simulated_system

pytestmark = pytest.mark.skipif(
    BROWSER is None and os.environ.get("TEST_BROWSER") != "required",
    reason="there is no Chromium here; on Debian: apt-get install chromium",
)

READY = "document.querySelector('#strategies input')"
STATUS = "document.getElementById('status').textContent"
OVER = f"/^(Done|Cancelled|Not all)/.test({STATUS})"
# A text that would be more than text, if the page took it for HTML.
PROMPT = "<img src=x onerror='document.title=1'> x & y"
CTRL = 2


@pytest.fixture
async def tab(tmp_path):
    assert BROWSER is not None, "TEST_BROWSER=required, and there is none"
    async with browsing(tmp_path / "browser") as tab:
        await tab.resize(1280, 900)
        yield tab


@pytest.fixture(scope="module")
def served():
    """A gateway over simulated models, which reject now and then."""
    with simulated_system(acceptance_rate=0.7).running() as system:
        process = GatewayProcess(f"--orchestrators={system.orchestrators[0].address}")
        with running(process):
            yield system, process


async def texts(tab):
    """Return each lane's text, without the prompt."""
    return await tab.js(
        "[...document.querySelectorAll('.lane')].map(lane =>"
        " [...lane.querySelectorAll('.token')].map(it => it.textContent).join(''))"
    )


async def count(tab, selector):
    return await tab.js(f"document.querySelectorAll({selector!r}).length")


async def ask(tab, url, **fields):
    """Open the page, fill fields in, and start."""
    await tab.open(url)
    await tab.until(READY)
    for name, value in fields.items():
        await tab.js(f"document.getElementById({name!r}).value = {value!r}")
    await tab.click("#start")


async def test_a_race_runs_to_its_end_and_its_link_repeats_it(served, tab):
    system, process = served
    await ask(tab, process.url, prompt=PROMPT, max_tokens="40", seed="11")
    await tab.until(OVER)
    assert await tab.js(STATUS) == "Done. All 3 texts are equal, token by token: 40 tokens."
    with system.client() as direct:
        expected = direct.generate(
            PROMPT, max_tokens=40, seed=11, temperature=0.7, top_p=0.95, ignore_eos=True
        ).text()
    assert await texts(tab) == [expected] * 3
    for what in (".token.accepted", ".token.corrected", ".bar.draft", ".bar.verify", ".bar.lost"):
        assert await count(tab, f"#results div {what}"), what  # and not in the legend
    assert await count(tab, ".bar.running") == 0
    names = "[...document.querySelectorAll('.timeline:nth-child(3) .name')].map(it => it.innerText)"
    first, *targets, last = await tab.js(names)
    assert (first, last) == ("drafter-0", "output")
    # Those that it used: on a busy machine that can be one alone.
    assert targets in (["target-0"], ["target-1"], ["target-0", "target-1"])
    rows = await tab.js("[...document.querySelectorAll('#numbers tbody th')].map(it=>it.innerText)")
    assert rows == ["non-SI", "SI", "DSI"]

    link = await tab.js("document.getElementById('link').href")
    assert parse_qs(link.partition("#")[2])["prompt"] == [PROMPT]
    await tab.open(link)
    await tab.until(READY)
    assert await count(tab, ".lane") == 0  # nothing runs before somebody says so
    await tab.click("#start")
    await tab.until(OVER)
    assert await texts(tab) == [expected] * 3
    assert await tab.js("document.title") == "Paceline: a race"
    assert tab.problems == []


@pytest.mark.long
async def test_what_is_shown_again_is_what_was_shown(served, tab):
    _, process = served
    shown = (
        "[...document.querySelectorAll('.lane, .timeline')].map(it => it.innerText"
        " + it.querySelectorAll('.bar').length + '/' + it.querySelectorAll('.lost').length)"
    )
    await tab.open(f"{process.url}/#max_tokens=24&together=1&prompt=p")
    await tab.until(READY)
    await tab.click("#start")
    await tab.until(OVER)
    before = await tab.js(shown)
    await tab.click("#again")
    await tab.until("document.querySelector('#again').disabled")
    await tab.until(OVER)
    assert await tab.js(shown) == before
    await tab.js("document.getElementById('speed').value = '0.2'")
    await tab.click("#again")
    await tab.click("#cancel")  # of a replay: its end is shown
    await tab.until(OVER)
    assert await tab.js(shown) == before
    assert tab.problems == []


@pytest.mark.parametrize("chats", [True, False])
async def test_a_model_that_chats_is_asked_by_its_template_and_others_continue_texts(tab, chats):
    template = TEMPLATE if chats else None
    async with gateway_over(FakeOrchestrator(chat_template=template)) as gateway:
        await ask(tab, gateway.url)
        await tab.until(OVER)
        (sent,) = {
            request.text or "".join(it.text for it in request.parts.parts)
            for request in gateway.requests
        }
        assert await tab.js("document.getElementById('chat').checked") == chats
        shown = await tab.js("document.getElementById('chat').checkVisibility()")
        assert shown == chats
        assert await tab.js("document.getElementById('ignore_eos').checked") == (not chats)
        assert ("What is the capital of France" in sent) == chats
        assert ("class Stack" in sent) == (not chats)
        # A text to continue is no question.
        await tab.js(
            "const it = document.getElementById('examples');"
            " it.value = 'def fibonacci(n):'; it.dispatchEvent(new Event('change'))"
        )
        await tab.click("#start")
        await tab.until(f"!document.querySelector('#start').disabled && {OVER}")
        assert gateway.requests[-1].text == "def fibonacci(n):"
    assert tab.problems == []


async def test_a_cancel_ends_the_work_and_another_race_can_begin(tab):
    fake = FakeOrchestrator(script=[Leg(), Leg(hangs=True, chunks=2)])
    async with gateway_over(fake) as gateway:
        await ask(tab, gateway.url)
        await tab.until("document.querySelectorAll('.lane')[1].querySelectorAll('.token').length")
        await tab.click("#cancel")
        await tab.until(OVER)
        async with asyncio.timeout(30):
            await fake.cancelled.wait()
        assert await tab.js(STATUS) == "Cancelled."
        facts = "[...document.querySelectorAll('.facts')].map(it => it.innerText)"
        assert (await tab.js(facts))[1:] == ["cancelled", "cancelled"]
        assert len(fake.requests) == 2  # the third did not begin
        await tab.click("#start")
        await tab.until(f"{STATUS}.startsWith('Done')")
    assert tab.problems == []


async def test_errors_are_told_where_they_belong_and_the_others_run_on(tab, monkeypatch):
    telepathy = {"name": "telepathy", "abbreviation": "TP"}
    monkeypatch.setattr(live_stream, "_STRATEGIES", [*live_stream._STRATEGIES, telepathy])
    broken = Leg(error=errors.InvariantViolatedError("secret"), chunks=2)
    async with gateway_over(FakeOrchestrator(script=[Leg(), broken])) as gateway:
        await ask(tab, gateway.url)
        await tab.until(OVER)
    told = await tab.js("[...document.querySelectorAll('.facts')].map(it => it.innerText)")
    assert len(told) == 4  # as many as the gateway has, and not three
    assert told[0].startswith("96 tokens")
    assert told[1].startswith("the gateway got no answer")
    assert told[2].startswith("96 tokens")
    assert "paceline.strategy" in told[3]
    assert "Not all strategies finished. SI: the gateway" in await tab.js(STATUS)
    verdict = await tab.js("document.getElementById('verdict').innerText")
    assert verdict == "The 2 finished texts are equal, token by token: 96 tokens."
    # A browser notes each answer of 400 and more by itself.
    assert all("status of 400" in each for each in tab.problems)


@pytest.mark.long
async def test_a_text_that_differs_is_cried_out(tab):
    class Liar(FakeOrchestrator):
        async def _answer(self, request, leg):
            async for response in super()._answer(request, leg):
                if response.chunk.position == 5 and len(self.requests) == 2:
                    response.chunk.token_ids[:] = [99]
                yield response

    async with gateway_over(Liar()) as gateway:
        await ask(tab, gateway.url, max_tokens="4")
        await tab.until(OVER)
    assert "A TEXT DIFFERS from that of non-SI: SI." in await tab.js(STATUS)


@pytest.mark.long
async def test_a_gateway_that_is_gone_is_told(tab):
    async with gateway_over() as gateway:
        await tab.open(gateway.url)
        await tab.until(READY)
    await tab.click("#start")
    await tab.until(OVER)
    assert "the gateway cannot be reached" in await tab.js("document.body.innerText")


@pytest.mark.long
async def test_a_key_is_asked_for_and_used(tab, tmp_path):
    path = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"sesame").hexdigest()
    path.write_text(f"- {{name: ali, sha256: {digest}}}")
    async with gateway_over(api_keys=path) as gateway:
        await tab.open(gateway.url)
        await tab.until("document.activeElement.id === 'key'")
        await tab.js("document.getElementById('key').value = 'abracadabra'")
        await tab.press("Enter", text="\r")
        await tab.until(f"{STATUS}.includes('API key is wrong')")
        await tab.js("document.getElementById('key').value = 'sesame'")
        await tab.press("Enter", text="\r")
        await tab.until(READY)
        assert not await tab.js("document.getElementById('door').checkVisibility()")
        await tab.click("#start")
        await tab.until(f"{STATUS}.startsWith('Done')")
        assert "sesame" not in await tab.js("location.href + document.body.innerHTML")
    assert all("status of 401" in each for each in tab.problems)


@pytest.mark.parametrize("width", [320, 700])
async def test_a_narrow_screen_scrolls_down_only(served, tab, width):
    _, process = served
    await tab.resize(width, 700, dark=True)
    await ask(tab, process.url, max_tokens="24", prompt="a" * 300)
    await tab.until(OVER)
    await tab.js("document.querySelector('details').open = true")
    assert await tab.js("document.documentElement.scrollWidth") <= width
    assert await tab.js("document.querySelector('#timelines').scrollWidth") > 320
    assert tab.problems == []


@pytest.mark.long
async def test_a_keyboard_and_a_screen_reader_find_everything(tab):
    async with gateway_over() as gateway:
        await tab.open(gateway.url)
        await tab.until(READY)
        await tab.js("document.getElementById('prompt').focus()")
        await tab.press("Enter", modifiers=CTRL)
        await tab.until(f"{STATUS}.startsWith('Done')")
        await tab.js("document.querySelector('details').open = true")
        nodes = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
        reached = []
        await tab.js("document.activeElement.blur()")
        for _ in range(40):
            await tab.press("Tab")
            reached.append(await tab.js("document.activeElement.id"))
    asked = {"textbox", "button", "checkbox", "combobox", "spinbutton", "link", "region", "image"}
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in asked
    ]
    assert {"textbox", "button", "checkbox", "spinbutton", "region", "image"} <= dict(found).keys()
    assert [role for role, name in found if not name.strip()] == []
    for each in ("prompt", "examples", "together", "seed", "start", "again", "link", "timelines"):
        assert each in reached
    assert any("verifications" in name or "drafts" in name for _, name in found)
