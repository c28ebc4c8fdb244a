"""The page: complete, cached by digest, locked down; and it works in a browser where one is."""

import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.live_server import LiveServer, serve_in_thread
from tests.scripted_engine import ScriptedEngine

from twinspark.config.server import ServerConfig
from twinspark.messages import EngineStatus
from twinspark.server.keys import KeyRing, read_key_list
from twinspark.server.page import FOLDER

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
KEY = "the-key-of-the-page"


@pytest.fixture
def engine(small_tokenizer) -> ScriptedEngine:
    return ScriptedEngine(small_tokenizer)


@pytest.fixture
def server(engine, small_tokenizer) -> Iterator[LiveServer]:
    with serve_in_thread(engine, small_tokenizer) as live:
        yield live


def test_every_file_is_served_with_its_type_and_asked_about_by_digest(server) -> None:
    page = httpx.get(server.url + "/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for entry in FOLDER.iterdir():
        path = f"{server.url}/static/{entry.name}"
        reply = httpx.get(path)
        assert reply.status_code == 200 and reply.content == entry.read_bytes()
        assert reply.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(path, headers={"if-none-match": reply.headers["etag"]})
        assert again.status_code == 304 and not again.content
    assert httpx.get(server.url + "/static/none.js").status_code == 404
    assert httpx.get(server.url + "/static/..%2fpage.py").status_code == 404


def test_what_the_page_needs_is_there_and_from_here(server) -> None:
    text = httpx.get(server.url + "/").text
    scripts = [e for e in FOLDER.iterdir() if e.name.endswith(".js")]
    code = "".join(entry.read_text() for entry in scripts)
    named = re.findall(r'(?:src|href)="([^"]+)"', text) + [
        f"static/{name}" for name in re.findall(r'from "\./([^"]+)"', code)
    ]
    assert len(named) > 4
    for path in named:
        assert not path.startswith(("/", "http"))  # relative: it works behind another base path
        assert httpx.get(f"{server.url}/{path}").status_code == 200, path
    for element in re.findall(r'\$\("(\w+)"\)|getElementById\("(\w+)"\)', code):
        assert f'id="{"".join(element)}"' in text
    assert "innerHTML" not in code and "style=" not in text and "onclick" not in text


def test_the_page_can_be_left_out(engine, small_tokenizer) -> None:
    with serve_in_thread(engine, small_tokenizer, ServerConfig(page=False)) as live:
        assert httpx.get(live.url + "/").status_code == 404
        assert httpx.get(live.url + "/health").status_code == 200


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def browser(started) -> Iterator[Any]:
    """One that has seen no page."""
    yield started
    for context in started.contexts:
        context.close()


def open_page(browser: Any, url: str, **options: Any) -> tuple[Any, list[str]]:
    page = browser.new_context(**options).new_page()
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    return page, problems


def test_a_chat_in_a_browser(browser, server, engine) -> None:
    engine.status = EngineStatus(
        running=1, waiting=2, rounds=3, slots_free=3, pool_tokens=1000, pool_free_tokens=600,
        cached_tokens_held=100, drafted_at=(10, 5), accepted_at=(8, 1),
    )  # fmt: skip
    engine.play(
        ["I <b>think</b>.", "</think>", "Code:\n```python\nx = 1 < 2\n```\nDone <i>it</i>."]
    )
    page, problems = open_page(browser, server.url)
    page.wait_for_selector("#status.ok")
    page.fill("#text", "First\nquestion")
    page.press("#text", "Enter")
    page.locator(".turn .foot").first.wait_for(timeout=10_000)
    assert page.locator(".turn.user .text").inner_text() == "First\nquestion"
    assert page.locator(".turn.assistant pre").inner_text() == "x = 1 < 2"
    answer = page.locator(".turn.assistant > .text")
    assert "Done <i>it</i>." in answer.inner_text() and answer.locator("i").count() == 0
    thought = page.locator(".thought .text")
    assert not thought.is_visible()
    page.click(".thought summary")
    assert thought.inner_text() == "I <b>think</b>."
    assert page.locator("#waiting").inner_text() == "2"
    assert page.locator("#kept").inner_text() == "60 %"
    assert "300 in use, 100 saved prefixes, 600 free" in page.locator("#pool").inner_text()
    page.locator("#recent tbody td.word", has_text="stop").first.wait_for()
    page.fill("#text", "Second")
    page.click("#send")
    page.locator(".turn .foot").nth(1).wait_for(timeout=10_000)
    assert "Done" in engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    assert problems == []


def test_a_new_chat_has_nothing_of_a_reply_that_was_under_way(browser, server, engine) -> None:
    page, problems = open_page(browser, server.url)
    for has_begun in (True, False):  # its text came, or nothing did
        engine.script = lambda request, begun=has_begun: (
            ([300] if begun else 0.02) for _ in range(10**6)
        )
        engine.round_s = 0.02
        page.fill("#text", "zebra")
        page.press("#text", "Enter")
        page.wait_for_selector("#stop:visible")
        if has_begun:
            # no function: asked a second time, it would need the eval that the page forbids
            page.wait_for_selector(".turn.assistant .text:not(:empty)", state="attached")
        engine.play(["</think>Two."])
        # at once: the old reply is over only after the new question stands
        page.evaluate(
            """() => {
                document.getElementById("clear").click();
                document.getElementById("text").value = "Second";
                document.getElementById("ask").requestSubmit();
            }"""
        )
        page.locator(".turn .foot").first.wait_for(timeout=10_000)
        page.fill("#text", "Third")
        page.press("#text", "Enter")
        page.locator(".turn .foot").nth(1).wait_for(timeout=10_000)
        asked = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
        assert "zebra" not in asked and page.locator(".turn").count() == 4
        assert asked.index("Second") < asked.index("Two.") < asked.index("Third")
        assert page.locator("#send").is_visible() and not page.locator("#stop").is_visible()
        page.click("#clear")
    assert problems == []


def test_a_stopped_reply_and_an_error_in_a_browser(browser, server, engine) -> None:
    engine.script = lambda request: ([300] for _ in range(10**6))
    engine.round_s = 0.02
    page, problems = open_page(browser, server.url, viewport={"width": 390, "height": 800})
    page.fill("#text", "Go")
    page.press("#text", "Enter")
    page.wait_for_selector("#stop:visible")
    page.locator(".turn.assistant").wait_for()
    page.click("#stop")
    page.locator(".turn .error", has_text="stopped").wait_for(timeout=10_000)
    assert not page.locator("#live").is_visible()
    page.click("nav button[data-show=live]")
    assert page.locator("#live").is_visible() and not page.locator("#chat").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click("nav button[data-show=chat]")
    page.fill("#text", "x" * 20000)
    page.click("#send")
    page.locator(".turn .error", has_text="maximum context").wait_for(timeout=10_000)
    assert [p for p in problems if "400" not in p] == []


def test_a_key_is_asked_for_in_a_browser(browser, engine, small_tokenizer) -> None:
    keys = KeyRing(read_key_list(f"me: {KEY}", "test"))
    engine.play(["</think>Hello."])
    with serve_in_thread(engine, small_tokenizer, keys=keys) as live:
        page, problems = open_page(browser, live.url)
        page.fill("#key", KEY)
        page.click("#keydialog button")
        page.wait_for_selector("#status.ok")
        page.fill("#text", "Hi")
        page.press("#text", "Enter")
        page.locator(".turn .foot").first.wait_for(timeout=10_000)
        page.locator("#recent td.word", has_text=re.compile("^me$")).first.wait_for(timeout=10_000)
        assert [p for p in problems if "401" not in p] == []


@pytest.fixture
def keyed(engine, small_tokenizer) -> Iterator[LiveServer]:
    keys = KeyRing(read_key_list(f"me: {KEY}", "test"))
    engine.play(["</think>Hello."])
    with serve_in_thread(engine, small_tokenizer, keys=keys) as live:
        yield live


def test_a_key_that_cannot_be_used_is_said_so_in_a_browser(browser, keyed) -> None:
    page, problems = open_page(browser, keyed.url)
    said = page.locator("#keyproblem")
    for key, why in (("", "No key"), ("schl\u00fcssel-\u6f22\u5b57", "ASCII")):
        page.fill("#key", key)
        page.press("#key", "Enter")
        said.filter(has_text=why).wait_for(timeout=5_000)
        assert page.evaluate("sessionStorage.length") == 0
    page.fill("#key", "a-wrong-key-of-nobody")
    page.press("#key", "Enter")
    said.filter(has_text="does not know that key").wait_for(timeout=5_000)
    page.fill("#key", f" {KEY} ")
    page.press("#key", "Enter")
    page.wait_for_selector("#status.ok")
    page.evaluate("sessionStorage.setItem('twinspark-key', '\u6f22')")  # as one from before
    page.reload()
    page.wait_for_selector("#keydialog[open]")
    page.fill("#key", KEY)
    page.click("#keydialog button.main")
    page.wait_for_selector("#status.ok")
    assert [p for p in problems if "401" not in p] == []


def test_a_closed_key_dialog_stays_closed_in_a_browser(browser, keyed) -> None:
    page, problems = open_page(browser, keyed.url)
    asked: list[str] = []
    page.wait_for_selector("#keydialog[open]")
    page.on("request", lambda request: asked.append(request.url))
    dialog = page.locator("#keydialog")
    page.fill("#key", KEY)  # written and not used
    page.keyboard.press("Escape")
    page.locator("#status", has_text="key needed").wait_for()
    page.wait_for_timeout(2_500)
    assert not dialog.is_visible() and asked == []
    page.fill("#text", "Hi")
    page.press("#text", "Enter")
    page.wait_for_selector("#keydialog[open]")
    page.click("#keydialog button[value=later]")
    page.locator(".turn .error").wait_for(timeout=5_000)
    page.wait_for_timeout(1_500)
    assert not dialog.is_visible() and len(asked) == 1
    page.click("#unlock")
    page.fill("#key", "a-wrong-key-of-nobody")
    page.press("#key", "Enter")
    page.locator("#keyproblem", has_text="does not know").wait_for(timeout=5_000)
    page.keyboard.press("Escape")
    page.fill("#text", "Again")
    page.press("#text", "Enter")
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    page.locator(".turn .foot").first.wait_for(timeout=10_000)
    page.wait_for_selector("#status.ok")
    assert not page.locator("#unlock").is_visible()
    assert [p for p in problems if "401" not in p] == []
