"""A server for the page alone: played statistics as events, and answers that are written in advance.

python -m ci.unit.http.page.fake_server 9000
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ci.unit.http.page.played_statistics import STEP_MS, PlayedStatistics
from inflight.http import page
from inflight.http.page.events import LiveBatch, server_sent_event

INDEX = Path(page.__path__[0]) / "index.html"
KEY = "secret"
MARKUP = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"
"""What a model may write, and what must stay text."""
STORY = f"""Once upon a time there was a little dog named Max. He loved to play in the park with his red ball.

One day the ball rolled under a bush, and Max could not reach it. {MARKUP}"""


class FakeServer(ThreadingHTTPServer):
    """On a free port, unless one is given."""

    daemon_threads = True

    def __init__(
        self, port: int = 0, *, needs_key: bool = False, token_seconds: float = 0.03, pooled: str = ""
    ) -> None:
        """`pooled`: what its models give that write no text, as /v1/models says it."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.needs_key = needs_key
        self.pooled = {"pooled": pooled} if pooled else {}
        self.token_seconds = token_seconds
        self.requests: list[tuple[str, object]] = []
        """Path and body of what the page asked for."""
        self.was_left = threading.Event()
        """A reader of an answer went away before its end."""
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def __enter__(self) -> FakeServer:
        self._thread = threading.Thread(target=self.serve_forever, name="fake-server")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append((self.path, None))
        if self.path == "/":
            self._answer("text/html; charset=utf-8", INDEX.read_bytes())
        elif not self._has_key():
            self._refuse()
        elif self.path == "/v1/models":
            models = [{"id": name, **self.server.pooled} for name in ("tiny-llama", "pirate")]
            self._answer("application/json", json.dumps({"data": models}).encode())
        elif self.path == "/events":
            self._send_events()
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        if self._has_key() and self.path == "/score":
            scores = [{"score": 0.25 * (place + 1)} for place, _ in enumerate(body["text_2"])]
            self._answer("application/json", json.dumps({"data": scores, "usage": {"total_tokens": 9}}).encode())
        elif self._has_key():
            self._chat()
        else:
            self._refuse()

    def _has_key(self) -> bool:
        return not self.server.needs_key or self.headers["Authorization"] == f"Bearer {KEY}"

    def _refuse(self) -> None:
        self._answer("application/json", json.dumps({"error": {"message": "the API key is wrong"}}).encode(), 401)

    def _answer(self, kind: str, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def _chat(self) -> None:
        self._begin_stream()
        words = STORY.split(" ")
        deltas = [{"role": "assistant", "content": ""}, {"reasoning": "A story. "}, {"reasoning": "A dog. "}]
        deltas += [{"content": word + " "} for word in words]
        chunks: list[dict[str, object]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(deltas) - 1}})
        try:
            for chunk in chunks:
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                self.server.is_over.wait(self.server.token_seconds)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.was_left.set()

    def _send_events(self) -> None:
        """Four iterations each, as fast as their clock runs; those of the last seconds come at once."""
        self._begin_stream()
        begin = time.time() - 12
        statistics = PlayedStatistics(seed=7, num_rows=12, begin=datetime.fromtimestamp(begin))
        batch, number = LiveBatch(), 0
        try:
            while not self.server.is_over.is_set():
                iterations, requests = zip(*(statistics.step() for _ in range(4)), strict=True)
                event = batch.advance(iterations, requests)
                assert event is not None
                self.wfile.write(server_sent_event(event))
                number += 4
                self.server.is_over.wait(max(begin + number * STEP_MS / 1000 - time.time(), 0))
        except OSError:
            pass  # the page was closed


if __name__ == "__main__":
    with FakeServer(int(sys.argv[1])) as running:
        print(running.url, flush=True)
        threading.Event().wait()
