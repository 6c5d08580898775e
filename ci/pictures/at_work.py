"""Pictures of a server at work, all from one real run of the default model: its page under load, a chat on it, the
load test's plot, and the dashboard's panels over the whole run.

    python -m ci.pictures.at_work       needs Chromium and Prometheus

Knows nothing of what the page draws, only when it has drawn enough to be looked at.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import openai
from PIL import Image

from ci.pictures import dashboard
from ci.unit.http.page.browser import Browser, find_chromium
from inflight_client import Client

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
HELPERS = ROOT / "ci" / "helpers"

STREAMS = 14
"""Requests at a time: half of them to the OpenAI server, half to tritonserver."""
PLACES = 10
"""Sequences in a step: fewer than STREAMS, so that some wait."""
LOADED_SECONDS = 35
"""For which the page is watched before its picture is taken: its curves reach so far back."""
SUBJECTS = ("a kite", "a little dog", "a red ball", "a boat", "a cat and a duck", "a lost key")
CHAT = ("What is the capital of France?", "Tell me a story about a little dog.")
LOAD_TEST = ("--concurrency", "1,2,4,8", "--output-tokens", "32")
COLOURS = 256
WHAT_IS_MISSING = (
    "make pictures: there is no Chromium: install Debian's package chromium, or name one in INFLIGHT_CHROMIUM"
)


def main() -> None:
    program = find_chromium()
    if program is None:
        raise SystemExit(WHAT_IS_MISSING)
    sys.path.insert(0, str(HELPERS))
    from prometheus import located, scraping
    from server_process import ServerProcess

    if located("prometheus") is None:
        raise SystemExit(
            "make pictures: there is no Prometheus: `make prometheus` fetches it where apt has the package"
        )

    parameters = {"max_batch_size": str(PLACES), "num_threads": "1"}
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(openai={"port": 0}, parameters=parameters) as server,
        scraping(server, Path(folder)) as prometheus,
    ):
        began = time.time()
        with Browser(program) as browser:
            with load(server.grpc_url, server.openai_url):
                shoot_page(browser, server.openai_url)
            shoot_chat(browser, server.openai_url)
        plot_load_test(["--url", server.grpc_url, "--metrics-url", server.metrics_url], Path(folder))
        dashboard.draw(prometheus, began, time.time(), Path(folder, "dashboard.png"))
        reduce(Path(folder, "dashboard.png"), FOLDER / "dashboard.png")


@contextmanager
def load(grpc_url: str, openai_url: str) -> Iterator[None]:
    """STREAMS requests at a time, each followed by another one."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        dice = random.Random(number)
        with Client(grpc_url) as client, openai.OpenAI(base_url=f"{openai_url}/v1", api_key="none") as chats:
            while not is_over.is_set():
                tokens, subject = dice.randint(16, 160), dice.choice(SUBJECTS)
                stream: AbstractContextManager[Iterable[object]]
                if number % 2:
                    stream = client.stream(f"Once there was {subject}.", max_tokens=tokens, temperature=1.0)
                else:
                    message = {"role": "user", "content": f"Tell me a story about {subject}."}
                    stream = chats.chat.completions.create(  # type: ignore[call-overload]
                        model="llm", messages=[message], max_completion_tokens=tokens, stream=True
                    )
                with stream as chunks:
                    next((chunk for chunk in chunks if is_over.is_set()), None)

    with ThreadPoolExecutor(STREAMS) as threads:
        asked = [threads.submit(ask, number) for number in range(STREAMS)]
        try:
            yield
        finally:
            is_over.set()
    for each in asked:
        each.result()


def shoot_page(browser: Browser, url: str) -> None:
    browser.show(f"{url}/", width=1280, height=760)
    browser.wait("document.querySelector('#model').value === 'llm'")
    browser.wait(f"performance.now() > {1000 * LOADED_SECONDS}")
    browser.run("document.querySelectorAll('#empty button')[1].click()")
    browser.wait("(document.querySelector('.answer p')?.textContent.length ?? 0) > 50")
    save(browser, "page.png")


def shoot_chat(browser: Browser, url: str) -> None:
    """In a window so narrow that the page shows the chat alone."""
    browser.show(f"{url}/", width=720, height=660, is_dark=True)
    browser.wait("document.querySelector('#model').value === 'llm'")
    browser.run("document.querySelector('#temperature').value = 0")
    for number, message in enumerate(CHAT, 1):
        browser.run("document.querySelector('#prompt').focus()")
        browser.type(message)
        browser.press("Enter", 13)
        browser.wait(f"document.querySelectorAll('.answer:not(.writing) small').length === {number}")
    save(browser, "chat.png")


def plot_load_test(server: Sequence[str], folder: Path) -> None:
    console = Path(sys.executable).with_name("inflight")
    subprocess.run([console, "load-test", *server, *LOAD_TEST, "--output", folder / "load"], check=True)
    reduce(folder / "load" / "plot.png", FOLDER / "load_test.png")


def save(browser: Browser, name: str) -> None:
    assert browser.problems == [], browser.problems
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, name)
        browser.screenshot(shot)
        reduce(shot, FOLDER / name)


def reduce(picture: Path, to: Path) -> None:
    """With COLOURS colours: a third of the bytes, and no difference that one sees."""
    with Image.open(picture) as image:
        few = image.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(to, optimize=True)
    print(to)


if __name__ == "__main__":
    main()
