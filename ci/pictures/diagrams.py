"""The two drawings of ARCHITECTURE.md, from the tables below: who owns whom in which process, and the life of a step.

python -m ci.pictures.diagrams      writes docs/pictures/owners.svg and step.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"

PROCESSES = (
    (
        "a front (stub, OpenAI server, …)",
        (
            (0, "Front", "the Executor API, one a process"),
            (1, "Journal", "requests, and what of them was sent"),
            (1, "Connection", "one for each replica, on a thread"),
            (2, "Launcher", "starts the ranks, or finds them"),
            (2, "Relaunches", "how long requests wait for new ranks"),
            (2, "link", "the socket to a launch's leader"),
        ),
    ),
    (
        "rank 0, the leader",
        (
            (0, "LeaderSocket", "all fronts' messages"),
            (1, "RequestBook", "requests in flight, their deadlines"),
            (0, "GptManager", "the loop, the same in every rank"),
            (1, "Scheduler", "which sequences run"),
            (2, "KVCacheManager", "blocks, shared prefixes"),
            (1, "ModelRunner", "network, KV cache, sampler"),
        ),
    ),
    (
        "rank 1 and others",
        (
            (0, "GptManager", "the same input, the same decisions"),
            (1, "Scheduler", ""),
            (2, "KVCacheManager", ""),
            (1, "ModelRunner", "its part of each layer"),
        ),
    ),
)
"""(a process, (depth, what it owns, what that is)): what is deeper is owned by the one above it."""
BETWEEN = ("requests ⇄ responses", "broadcast")

LANES = (
    (
        "host",
        (
            ("collect N-1", 1.2),
            ("responses", 1.1),
            ("new requests, broadcast", 1.9),
            ("schedule N+1", 1.3),
            ("prepare", 0.9),
            ("launch", 0.8),
        ),
    ),
    ("device", (("forward N", 4.6), ("sample N", 1.3), ("forward N+1 …", 1.3))),
    ("to the host", (("results N-1", 1.2), ("", 4.7), ("results N", 1.3))),
)
"""(a lane, (what happens, its width)): one iteration, in which step N computes. Widths are no measurements."""

STYLE = (
    "<style>text{font-family:system-ui,sans-serif;fill:#22303c}.b{font-weight:600}.m{fill:#5d6b78}"
    ".p{fill:#eef2f5;stroke:#9fb0bf}.o{fill:#fff;stroke:#c5d0da}.d{fill:#d7ebe6;stroke:#8dbdb0}</style>"
)


def owners() -> str:
    width, gap, row, top = 300, 92, 46, 42
    height = top + row * max(len(owned) for _, owned in PROCESSES) + 12
    body: list[str] = []
    for number, (process, owned) in enumerate(PROCESSES):
        x = number * (width + gap)
        body += [_box(x, 1, width, height, "p"), _text(x + 14, 26, process, "b", 14)]
        for place, (depth, name, what) in enumerate(owned):
            y, left = top + place * row, x + 14 + 22 * depth
            body.append(_box(left, y, width - 28 - 22 * depth, row - 8, "o"))
            body += [_text(left + 8, y + 16, name, "b", 13), _text(left + 8, y + 31, what, "m", 11.5)]
    for number, label in enumerate(BETWEEN):
        x, y = (number + 1) * width + number * gap, top + 18
        words = label.split(" ⇄ ")
        body += [_line(x + 4, y, x + gap - 4), _text(x + gap / 2, y - 8, words[0], "m", 11.5, "middle")]
        if len(words) == 2:
            body += [_line(x + gap - 4, y + 26, x + 4), _text(x + gap / 2, y + 42, words[1], "m", 11.5, "middle")]
    return _svg(len(PROCESSES) * (width + gap) - gap, height + 2, "Who owns whom in which process", body)


def step() -> str:
    unit, lane, left = 112, 52, 92
    body: list[str] = []
    for number, (name, parts) in enumerate(LANES):
        y, x = 8 + number * lane, float(left)
        body.append(_text(0, y + 25, name, "b", 13))
        for what, size in parts:
            if what:
                kind = "d" if name == "device" else "o"
                body += [_box(x, y, unit * size - 4, lane - 12, kind)]
                body.append(_text(x + (unit * size - 4) / 2, y + 25, what, "", 12.5, "middle"))
            x += unit * size
    width = left + unit * max(sum(size for _, size in parts) for _, parts in LANES)
    return _svg(width, 8 + lane * len(LANES), "The life of a step", body)


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>'


def _text(x: float, y: float, text: str, kind: str, size: float, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x: float, y: float, to: float) -> str:
    head = 6 if to > x else -6
    return (
        f'<path d="M{x:g} {y:g}H{to:g}m{-head} -4l{head} 4l{-head} 4" fill="none" stroke="#5d6b78" stroke-width="1.5"/>'
    )


def _svg(width: float, height: float, title: str, body: Sequence[str]) -> str:
    shown = f'viewBox="-8 -8 {width + 16:g} {height + 16:g}" width="{width + 16:g}" height="{height + 16:g}"'
    paper = f'<rect x="-8" y="-8" width="{width + 16:g}" height="{height + 16:g}" fill="#fff"/>'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {shown}>', f"<title>{title}</title>", STYLE, paper, *body]
    return "\n".join([*lines, "</svg>", ""])


DRAWINGS = {"owners.svg": owners, "step.svg": step}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
