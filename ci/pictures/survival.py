"""README's picture: what `make demo-survival` printed, as an animation that keeps the run's own pauses.

    python -m ci.pictures.survival --record     runs the demo, keeps its output as survival.cast, draws it
    python -m ci.pictures.survival              draws the kept output again

The recording is in asciinema's format, version 2. Knows nothing of the server: it reads what a terminal would show.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
CAST = ROOT / "docs" / "pictures" / "survival.cast"
PICTURE = CAST.with_suffix(".svg")
SPARES = ("--spares", "1")

COLUMNS = 98
CHARACTER, LINE = 7.8, 18.0
"""Width and height in pixels of a character of 13 pixels."""
MARGIN, TOP = 18.0, 48.0
KILL = "[kill -9]"
LONGEST_WAIT = 0.8
"""Seconds that a wait outside an answer takes in the picture: the server's start and end say nothing."""
SLOWER = 3
"""Times that an answer takes in the picture what it took in the run: it came faster than anybody reads."""
STEP = 0.05
"""Seconds between two frames: what came within one is shown at once."""
HOLD = 7.0
"""Seconds for which the last frame stays."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Characters of one line that appeared at the same moment."""

    at: float
    row: int
    column: int
    text: str


def record(path: Path, arguments: Sequence[str]) -> None:
    command = [sys.executable, str(ROOT / "ci" / "demo_survival.py"), *arguments]
    # Its output is read by the byte as it comes: a pipe's reader in Python would wait for more.
    with subprocess.Popen(command, stdout=subprocess.PIPE) as demo:
        assert demo.stdout is not None
        events, began = [], time.monotonic()
        while read := os.read(demo.stdout.fileno(), 65536):
            events.append([round(time.monotonic() - began, 3), "o", read.decode()])
    if demo.returncode != 0:
        raise SystemExit(f"the demo ended with {demo.returncode}: nothing was recorded")
    title = f'make demo-survival ARGS="{" ".join(arguments)}"' if arguments else "make demo-survival"
    machine = f"{os.cpu_count()} cores, {processor()}"
    head = {"version": 2, "width": COLUMNS, "height": 24, "timestamp": int(time.time()), "title": title}
    lines = [json.dumps(each, ensure_ascii=False) for each in ({**head, "machine": machine}, *events)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def processor() -> str:
    names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return names[0].strip() if names else platform.machine()


def picture(cast: str) -> str:
    """The SVG of a recording."""
    head, *events = map(json.loads, cast.splitlines())
    pieces = list(placed(shown(events)))
    rows = 1 + max(piece.row for piece in pieces)
    end = pieces[-1].at + HOLD
    width, height = 2 * MARGIN + COLUMNS * CHARACTER, TOP + rows * LINE + 36
    date = time.strftime("%Y-%m-%d", time.gmtime(head["timestamp"]))
    run = f"A real run of {date} on {head['machine']}."
    foot = f"{run} Answers are shown {SLOWER} times slower; waits outside them are cut."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="13">',
            "<title>A rank is killed in the middle of a JSON answer; the stream goes on with the same bytes</title>",
            f"<style>text{{white-space:pre;fill:{INK}}}.kill{{fill:{RED};font-weight:bold}}.end{{fill:{GREEN}}}"
            f".dim{{fill:{DIM}}}</style>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{PAPER}"/>',
            *(f'<circle cx="{20 + 18 * n}" cy="18" r="5.5" fill="{c}"/>' for n, c in enumerate((RED, AMBER, GREEN))),
            f'<text x="84" y="22" class="dim">$ {escape(head["title"])}</text>',
            # What every other animation counts from. It begins again when it ends.
            f'<rect width="0" height="0"><animate id="run" attributeName="x" from="0" to="0" dur="{end:.2f}s" '
            'begin="0s;run.end"/></rect>',
            *map(drawn, pieces),
            f'<text x="{MARGIN:g}" y="{height - 14:g}" class="dim" font-size="11">{escape(foot)}</text>',
            "</svg>",
            "",
        ]
    )


PAPER, INK, DIM, RED, AMBER, GREEN = "#10161d", "#d5dde5", "#8593a0", "#ff6b5e", "#e5b34b", "#6fcf7c"


def drawn(piece: Piece) -> str:
    """Where nothing is animated it is visible: a still picture is the last frame."""
    kind = ' class="kill"' if piece.text == KILL else ' class="end"' if "are equal" in piece.text else ""
    x, y = MARGIN + piece.column * CHARACTER, TOP + (piece.row + 0.7) * LINE
    length = f' textLength="{len(piece.text) * CHARACTER:.1f}"'  # whatever the font, columns stay columns
    hidden = f'<set attributeName="visibility" to="hidden" begin="run.begin" dur="{piece.at:.2f}s"/>'
    return f'<text x="{x:.1f}" y="{y:.1f}"{length}{kind}>{escape(piece.text)}{hidden}</text>'


def shown(events: Sequence[Sequence[object]]) -> Iterator[tuple[float, str]]:
    """(second of the picture, text) of each event."""
    at, is_answer = 0.2, False
    for (before, _, earlier), (now, _, text) in pairwise([[0.0, "o", ""], *events]):
        wait = float(str(now)) - float(str(before))
        is_answer = (is_answer and "\n" not in str(earlier)) or str(earlier).endswith(":\n\n")
        begins = str(earlier).endswith(":\n\n")
        at += SLOWER * wait if is_answer and not begins else min(wait, LONGEST_WAIT)
        yield at, str(text)


def placed(timed: Iterator[tuple[float, str]]) -> Iterator[Piece]:
    """Each piece on its row, wrapped at COLUMNS as a terminal does."""
    characters: list[tuple[float, int, bool, int, str]] = []
    row = column = 0
    for at, text in timed:
        for character in text:
            if character == "\n":
                row, column = row + 1, 0
                continue
            if column == COLUMNS:
                row, column = row + 1, 0
            characters.append((round(at / STEP) * STEP, row, KILL in text, column, character))
            column += 1
    for (at, on, _), group in groupby(characters, key=lambda each: each[:3]):
        letters = list(group)
        text = "".join(letter for *_, letter in letters)
        start = len(text) - len(text.lstrip())
        if text.strip():
            yield Piece(at, on, letters[0][3] + start, text.strip())


if __name__ == "__main__":
    if "--record" in sys.argv[1:]:
        record(CAST, SPARES)
    PICTURE.write_text(picture(CAST.read_text(encoding="utf-8")), encoding="utf-8")
    print(PICTURE)
