"""The page is one small file that asks nobody but its own server, and works in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from ci.unit.http.page.browser import Browser, find_chromium
from ci.unit.http.page.fake_server import INDEX, KEY, MARKUP, STORY, FakeServer

PAGE = INDEX.read_text(encoding="utf-8")
SCRIPT = PAGE.split("<script>")[1].split("</script>")[0]
PURE_SCRIPT = SCRIPT.split("// -- The page ---")[0]

needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="there is no Chromium: name one in INFLIGHT_CHROMIUM"
)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(PAGE)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_it_is_small() -> None:
    assert len(PAGE.encode()) < 40 * 1024


def test_it_names_no_other_host_and_keeps_nothing() -> None:
    assert re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", PAGE.replace("http://www.w3.org/2000/svg", "")) == []
    for word in ("localStorage", "sessionStorage", "document.cookie", "indexedDB"):
        assert word not in PAGE


def test_no_text_becomes_markup() -> None:
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert word not in PAGE


@pytest.mark.parametrize("tag", ["script", "style"])
def test_the_policy_allows_exactly_what_the_page_has(tag: str) -> None:
    """After a change of the page, write the digest that is missed into its Content-Security-Policy."""
    (body,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}';" in PAGE


def test_every_control_has_a_name() -> None:
    labelled = {attrs.get("for") for tag, attrs in Elements().found if tag == "label"}
    for tag, attrs in Elements().found:
        if tag in ("select", "textarea"):
            assert attrs["id"] in labelled
    for name in ("temperature", "max-tokens", "key"):
        assert re.search(rf'<label>[^<]+<input id="{name}"', PAGE), name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scheme: str) -> None:
    """4.5 to 1, as WCAG 2.2 asks for text (success criterion 1.4.3)."""
    light, dark = PAGE.split("prefers-color-scheme: dark")[:2]
    colors = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+)", light))
    if scheme == "dark":
        colors |= dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+)", dark.split("* {")[0]))
    pairs = [(text, ground) for text in ("text", "muted") for ground in ("page", "card", "soft")]
    pairs += [("on-accent", "accent"), ("on-bar", "decode"), ("text", "mine"), ("error", "card")]
    low = [pair for pair in pairs if contrast(colors[pair[0]], colors[pair[1]]) < 4.5]
    assert low == []


def contrast(first: str, second: str) -> float:
    """By WCAG's formula, from the colours' relative luminance."""
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: str) -> float:
    digits = color[1:] if len(color) == 7 else "".join(digit * 2 for digit in color[1:])
    channels = [int(digits[index : index + 2], 16) / 255 for index in (0, 2, 4)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@needs_node
@pytest.mark.slow
def test_the_scripts_pure_parts() -> None:
    checks = r"""
    const assert = require("node:assert");
    const text = ": a comment\r\ndata: {\"a\": 1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\n\n\ndata: not whole\n";
    for (let size = 1; size <= text.length; size++) {
      const read = makeEventReader(), found = [];
      for (let at = 0; at < text.length; at += size) found.push(...read(text.slice(at, at + size)));
      assert.deepEqual(found, ['{"a": 1}', "two\nlines"]);
    }
    const row = (id, state, changes) => ({id, sequence_index: 0, lane: 3, state, changes, num_generated_tokens: 5});
    const event = (time_ms, ...rows) => ({time_ms, duration_ms: 100, rows});
    const timeline = makeTimeline(10);
    timeline.add(event(1000, row("1", "prefill", [[910, "queued"], [950, "prefill"]]), row("2", "decode", [])));
    timeline.add(event(1100, row("1", "decode", [[1050, "decode"]]), row("2", "decode", [])));
    timeline.add(event(1200, row("1", "done", [[1180, "done"]])));
    const bars = timeline.bars(1200).map(({id, state, from, to, joined, left}) => [id, state, from, to, joined, left]);
    assert.deepEqual(bars, [
      ["1", "queued", 910, 950, true, false], ["1", "prefill", 950, 1050, false, false],
      ["2", "decode", 900, 1200, false, true], ["1", "decode", 1050, 1180, false, true],
    ]);
    assert.deepEqual(timeline.bars(12000), []);
    timeline.add(event(13000, row("3", "decode", [[12950, "decode"]])));
    timeline.stop(13000);
    assert.deepEqual(timeline.bars(13000).map(({to, left}) => [to, left]), [[13000, false]]);
    assert.deepEqual([0, 0.5, 12.34, 1234, 45678, 2e6, null].map(each => shown(each)),
      ["0", "0.50", "12.3", "1,234", "45.7k", "2.00M", "–"]);
    assert.equal(speed(0, 100, 1100, 11), "first token after 100 ms · 11 tokens · 10 tokens/s");
    assert.equal(speed(0, 0, 0, 0), "");
    assert.deepEqual(linesOf(" a \n\n\tb c\r\n"), ["a", "b c"]);
    assert.equal(ranked(["a", "b", "c"], [0.25, -1, 0.5]), "0.5000  c\n0.2500  a\n-1.0000  b");
    """
    done = subprocess.run(
        ["node", "-e", PURE_SCRIPT + checks], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    assert program is not None
    with Browser(program) as running:
        yield running


def open_page(browser: Browser, server: FakeServer, **how: int) -> None:
    browser.show("about:blank")  # the page before it may still complain that its server is gone
    browser.problems.clear()
    browser.show(server.url, **how)


@needs_chromium
@pytest.mark.slow
class TestInABrowser:
    def test_a_message_is_answered_as_text(self, browser: Browser) -> None:
        with FakeServer(token_seconds=0.0) as server:
            open_page(browser, server)
            browser.wait("document.querySelector('#model').value === 'tiny-llama'")
            browser.run("document.querySelector('#prompt').focus()")
            browser.type("A story, please")
            browser.press("Enter", 13)
            browser.wait("document.querySelector('#said').textContent.startsWith('Answer complete')")
            assert browser.run("document.querySelector('.answer p').textContent").split() == STORY.split()
            assert browser.run("document.querySelector('.answer details div').textContent") == "A story. A dog. "
            assert (
                MARKUP.split()[0] in STORY and browser.run("document.querySelectorAll('#log img, #log b').length") == 0
            )
            assert browser.run("document.title") == "inflight"
            assert "tokens" in browser.run("document.querySelector('.answer small').textContent")
            ((_, body),) = [each for each in server.requests if each[0] == "/v1/chat/completions"]
            assert body == {
                "model": "tiny-llama",
                "messages": [{"role": "user", "content": "A story, please"}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0.7,
                "max_completion_tokens": 512,
            }
            assert browser.problems == []

    def test_an_encoder_compares_texts(self, browser: Browser) -> None:
        with FakeServer(pooled="vectors") as server:
            open_page(browser, server)
            browser.wait("document.querySelector('#send').textContent === 'Compare'")
            assert browser.run("document.querySelector('#tab-chat').textContent") == "Texts"
            browser.run("document.querySelector('#prompt').value = 'a fox\\na ship\\nan animal'")
            browser.run("document.querySelector('#send').click()")
            browser.wait("document.querySelector('#said').textContent.startsWith('Answer complete')")
            told = browser.run("document.querySelector('.answer p').textContent")
            assert told == "0.5000  an animal\n0.2500  a ship"
            ((_, body),) = [each for each in server.requests if each[0] == "/score"]
            assert body == {"model": "tiny-llama", "text_1": "a fox", "text_2": ["a ship", "an animal"]}
            assert browser.problems == []

    def test_stop_ends_the_request_and_keeps_what_came(self, browser: Browser) -> None:
        with FakeServer(token_seconds=0.05) as server:
            open_page(browser, server)
            browser.run("document.querySelector('#empty button').click()")
            browser.wait("document.querySelector('.answer p').textContent.includes('Once')")
            browser.run("document.querySelector('#send').click()")
            browser.wait("document.querySelector('.answer small').textContent.includes('stopped')")
            assert server.was_left.wait(120)
            assert browser.run("document.querySelector('#send').textContent") == "Send"
            assert browser.run("messages.length") == 2

    def test_a_new_chat_forgets_the_one_that_it_interrupts(self, browser: Browser) -> None:
        with FakeServer(token_seconds=0.05) as server:
            open_page(browser, server)
            browser.run("document.querySelector('#empty button').click()")
            browser.wait("document.querySelector('.answer p').textContent.includes('Once')")
            browser.run("document.querySelector('#clear').click()")
            browser.wait("document.querySelector('#send').textContent === 'Send'")
            assert browser.run("messages.length + document.querySelectorAll('#log article').length") == 0

    def test_the_batch_is_drawn_and_told_in_words(self, browser: Browser) -> None:
        with FakeServer() as server:
            open_page(browser, server)
            browser.wait("document.querySelector('#counts').value.includes('decode')")
            browser.run("document.querySelector('#rows summary').click()")
            browser.wait("document.querySelectorAll('#rows tbody tr').length > 3")
            browser.wait("Number(document.querySelector('#rate').textContent) > 0")
            browser.wait("document.querySelector('#device output').value.includes('used')")
            drawn = """(() => {
              const canvas = document.querySelector('#lanes');
              const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
              return data.some((value, index) => index % 4 === 3 && value === 255);
            })()"""
            browser.wait(drawn)
            assert browser.problems == []

    def test_a_key_is_asked_for_and_sent(self, browser: Browser) -> None:
        with FakeServer(needs_key=True) as server:
            open_page(browser, server)
            browser.wait("document.querySelector('#link').textContent.startsWith('API key needed')")
            assert not browser.run("document.querySelector('#options').hidden")
            browser.run("document.querySelector('#key').focus()")
            browser.type(KEY)
            browser.press("Enter", 13)
            browser.wait("document.querySelector('#link').classList.contains('live')")
            browser.wait("document.querySelector('#model').value === 'tiny-llama'")

    def test_on_a_phone_one_view_is_shown_and_nothing_is_cut(self, browser: Browser) -> None:
        with FakeServer() as server:
            open_page(browser, server, width=360, height=740)
            browser.wait("document.querySelector('#counts').value.includes('decode')")
            assert browser.run("getComputedStyle(document.querySelector('#batch')).display") == "none"
            browser.run("document.querySelector('#tab-chat').focus()")
            browser.press("ArrowRight", 39)
            assert browser.run("document.activeElement.id") == "tab-batch"
            assert browser.run("getComputedStyle(document.querySelector('#chat')).display") == "none"
            assert browser.run("document.documentElement.scrollWidth") == 360
