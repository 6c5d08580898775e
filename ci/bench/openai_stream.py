"""CPU time of the OpenAI server per streamed token, on a played engine: `python -m ci.bench.openai_stream`.

The server runs in this process, with everything between a leader's message and the socket: decoding, journal, text,
chunks, HTTP. The played engine replays the messages of a batch in which every stream gets one token a step. The clients
are a process of their own, which reads bytes and counts them. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("ci/helpers", "backend", "kernels", "client")]

GOAL_US = 10.0
"""Front-end CPU per streamed token at 256 streams."""
MESSAGES = [{"role": "user", "content": "Once"}]
CHAT = {"messages": MESSAGES, "stream": True}
ASKED: dict[str, tuple[dict[str, object], bytes, bytes]] = {
    "/v1/completions": (
        {"prompt": "Once", "max_tokens": 2048, "stream": True, "ignore_eos": True},
        b"data: {",
        b"data: [DONE]",
    ),
    "/v1/chat/completions": ({**CHAT, "ignore_eos": True}, b"data: {", b"data: [DONE]"),
    "/v1/responses": ({"input": "Once", "stream": True}, b"data: {", b"event: response.incomplete"),
    "/v1/messages": ({**CHAT, "model": "llm", "max_tokens": 2048}, b"data: {", b"event: message_stop"),
    "/api/chat": ({**CHAT, "model": "llm"}, b"}\n", b'"done":true'),
}
"""Path -> body, what each chunk of its stream holds once, and what the last one holds."""
END_BYTES = 4096
"""Kept of a stream, in which its end is looked for."""
WORDS = " the little dog ran over the green hill and found a friend"


def serve(num_streams: int, num_tokens: int, step_ms: float, path: str) -> dict[str, object]:
    """`step_ms`: between two steps of the engine; 0 = as fast as the server takes them."""
    from fake_tokenizer import merged_byte_tokenizer
    from openai_server import checkpoint_folder, openai_server
    from replaying_engine import ReplayingEngine

    from inflight.http.serve import calm_gc, new_loop

    tokenizer = merged_byte_tokenizer()
    engine = ReplayingEngine(tokenizer.encode_plain(WORDS), num_streams, num_tokens, step_ms / 1000)
    server_options = {"tokenizer": tokenizer, "max_open_requests": num_streams, "new_loop": new_loop}
    with (
        tempfile.TemporaryDirectory() as folder,
        openai_server(engine, checkpoint_folder(Path(folder)), **server_options) as url,
    ):
        host, port = url.removeprefix("http://").split(":")
        options = ["--client", host, port, "--streams", str(num_streams), "--path", path]
        program = [sys.executable, "-m", "ci.bench.openai_stream", *options]
        with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as clients:
            calm_gc()
            engine.run(clients.wait)
            told, _ = clients.communicate()
    heard = json.loads(told)
    num_sent = num_streams * num_tokens
    return {
        "path": path,
        "streams": num_streams,
        "step_ms": step_ms,
        "tokens": num_sent,
        "tokens_per_second": round(num_sent / engine.wall_seconds),
        "tokens_per_chunk": round(num_sent / max(heard["chunks"] - 2 * num_streams, 1), 2),
        "cpu_us_per_token": round(1e6 * (engine.user_seconds + engine.system_seconds) / num_sent, 2),
        "of_it_system_us": round(1e6 * engine.system_seconds / num_sent, 2),
    }


def read(host: str, port: int, num_streams: int, path: str) -> None:
    """The clients: all streams at once, until each has ended."""
    body, chunk, end = ASKED[path]
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    selector, num_chunks = selectors.DefaultSelector(), 0
    for _ in range(num_streams):
        connection = socket.create_connection((host, port))
        connection.sendall(head + data)
        selector.register(connection, selectors.EVENT_READ, bytearray())
    open_streams = num_streams
    while open_streams:
        for key, _ in selector.select():
            received = key.fileobj.recv(65536)
            num_chunks += received.count(chunk)
            key.data[:] = (key.data + received)[-END_BYTES:]
            if not received or end in key.data:
                selector.unregister(key.fileobj)
                open_streams -= 1
    print(json.dumps({"chunks": num_chunks}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[50.0, 20.0, 0.0])
    parser.add_argument("--path", default="/v1/completions", choices=[*ASKED])
    parser.add_argument("--client", nargs=2, metavar=("HOST", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        read(options.client[0], int(options.client[1]), options.streams, options.path)
        return
    rows = [serve(options.streams, options.tokens, step, options.path) for step in options.step_ms]
    print(f"{'step ms':>8}  {'tokens/s':>9}  {'tokens/chunk':>12}  {'CPU us/token':>12}   (goal {GOAL_US:g})")
    for row in rows:
        print(
            f"{row['step_ms']:>8}  {row['tokens_per_second']:>9}  {row['tokens_per_chunk']:>12}  "
            f"{row['cpu_us_per_token']:>12}"
        )
    print(
        json.dumps(
            {"bench": "openai_stream", "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
