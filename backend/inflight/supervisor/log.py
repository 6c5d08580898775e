"""tritonserver's log: followed line by line, kept at its end, and told to people only where it matters."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from inflight.supervisor.log_file import LogFile

KEPT_LINES = 400
OWN_LINE = re.compile(r"^([IWE])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ")
"""How tritonserver begins a line; anything else was printed by a stub or a rank, or goes on with the line before."""

HARMLESS = re.compile(r"CudaDriverHelper has not been initialized|Failed to initialize NVML")
"""What tritonserver calls an error on every machine without a GPU."""

LOUD = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|^Traceback \(most recent call last\)")
FAILED_LOAD = re.compile(r"failed to load '([^']+)' version \d+: (?:[A-Z][A-Za-z ]+: )?(.*)")


class ServerLog:
    """Reads one server's output in a thread until it ends."""

    def __init__(self, tell: Callable[[str], None], *, verbose: bool = False, file: Path | None = None) -> None:
        self._tell, self._verbose = tell, verbose
        self._file = LogFile(file, tell) if file is not None else None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._loud = False
        self._hushed = True
        """Until the server has started."""
        self._thread: threading.Thread | None = None

    def follow(self, stream: IO[str], began: Callable[[], None] = lambda: None) -> None:
        """Begin with a new server's output; the lines kept are those of this server. `began` is called at its first
        line, in the thread that reads."""
        self._lines.clear()
        self._loud = False
        self._hushed = True
        self._thread = threading.Thread(target=self._read, args=(stream, began), name="server-log", daemon=True)
        self._thread.start()

    def tell_errors(self) -> None:
        """From now on, for the server has started. Why one could not start is told once, in one sentence."""
        self._hushed = False

    def join(self, timeout: float) -> None:
        """Wait for the end of the output of a server that has ended."""
        if self._thread is not None:
            self._thread.join(timeout)

    def load_failure(self) -> str:
        """Why a model could not be loaded, in its own words and one line; "" if the log tells no such thing."""
        for line in self._lines:
            if found := FAILED_LOAD.search(line):
                return f"model {found[1]} cannot be loaded: {_sentence(found[2])}"
        return ""

    def last_error(self) -> str:
        """The last error line without its date; "" if there is none."""
        for line in reversed(self._lines):
            if line.startswith("E") and OWN_LINE.match(line) and not HARMLESS.search(line):
                return line.partition("] ")[2].strip('"')
        return ""

    def _read(self, stream: IO[str], began: Callable[[], None]) -> None:
        """To the end, whatever happens to a line: a server whose pipe nobody empties stands still."""
        try:
            for line in stream:
                line = line.rstrip("\n")
                if not self._lines:
                    began()
                self._lines.append(line)
                if self._file:
                    self._file.write(line)
                if self._verbose or (self._is_loud(line) and not self._hushed):
                    self._tell(line)
        finally:
            stream.close()
            if self._file:
                self._file.close()

    def _is_loud(self, line: str) -> bool:
        """Errors, and the lines that go on with them."""
        if HARMLESS.search(line):
            return False
        if own := OWN_LINE.match(line):
            self._loud = own[1] == "E"
        elif LOUD.search(line):
            self._loud = True
        elif line and not line[0].isspace() and not self._loud:
            return False
        return self._loud


def _sentence(reason: str) -> str:
    """A reason from the log without the exception's name before it and the place in the code after it."""
    return re.sub(r"^TritonModelException: ", "", reason.partition(r"\n\nAt:")[0].rstrip('"'))
