"""Reads the log of a server line by line, keeps its last lines, and shows the user errors and what the engine is.

It is tritonserver's, or the OpenAI server's where that is alone.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from inflight.supervisor.log_file import LogFile
from inflight.supervisor.losses import Losses

KEPT_LINES = 400
OWN_LINE = re.compile(r"^([IWE])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ")
"""The start of tritonserver's own lines. Other lines are from a stub or a rank, or continue the line before."""

HARMLESS = re.compile(r"CudaDriverHelper has not been initialized|Failed to initialize NVML")
"""Errors that tritonserver logs on every machine without a GPU."""

LOUD = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|^Traceback \(most recent call last\)")
ABOUT_ENGINE = re.compile(
    r"[IW]\d{4} [^\]]*\binflight\."
    r"(?:server\.start|http\.serve|models\.compiled|runtime\.device|executor\.launchers\.external)\] "
    r"(engine .+|the layers run in torch, .+|the checkpoint is in .+|no ranks serve .+)"
)
"""What an engine is, why it is slower than it could be, that its type is not the checkpoint's, and that its ranks are
waited for, in the log of its front and its ranks."""
TO_USER = "inflight: "
"""The start of a line that a program of ours prints for its user."""
FAILED_LOAD = re.compile(r"failed to load '([^']+)' version \d+: (?:[A-Z][A-Za-z ]+: )?(.*)")
BAD_OPTION = re.compile(r"tritonserver: (.*\boption\b.*)|Bad option: \"(.*)\"\.")
"""What tritonserver says of an option on its command line; after the second form the reason is the next line."""


class ServerLog:
    """Reads the output of one run of a server after the other, in a thread each."""

    def __init__(
        self,
        tell: Callable[[str], None],
        losses: Losses | None = None,
        *,
        verbose: bool = False,
        file: Path | None = None,
    ) -> None:
        """`losses`: gets the lines about lost ranks, unless errors are hushed."""
        self._tell, self._losses, self._verbose = tell, losses, verbose
        self._file = LogFile(file, tell) if file is not None else None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._bad_option: list[str] = []
        self._about_engine: set[str] = set()
        """What has been shown of it: every rank logs it, and again after a relaunch."""
        self._loud = False
        self._hushed = True
        """Whether errors are not shown, because the server has not started yet, or is being ended."""
        self._thread: threading.Thread | None = None

    def follow(self, stream: IO[str], began: Callable[[], None] = lambda: None) -> None:
        """Read the output of a new run; the lines of the run before are dropped. `began` is called at the first line,
        in the reading thread."""
        self._lines.clear()
        self._bad_option.clear()
        self._about_engine.clear()
        self._loud = False
        self._hushed = True
        self._thread = threading.Thread(target=self._read, args=(stream, began), name="server-log", daemon=True)
        self._thread.start()

    def tell_errors(self) -> None:
        """Show errors from now on, because the server has started. A failed start is reported in one sentence."""
        self._hushed = False

    def hush_errors(self) -> None:
        """Show none from now on, because the server is being ended: parts of it that miss each other, and requests that
        it never freed, concern nobody any more."""
        self._hushed = True

    def join(self, timeout: float) -> None:
        """Wait for the end of the output, after the server has ended."""
        if self._thread is not None:
            self._thread.join(timeout)

    def bad_option(self) -> str:
        """Which option tritonserver refused, and why; "" if none. It is kept because hundreds of lines of usage come
        with it."""
        return ": ".join(self._bad_option)

    def load_failure(self) -> str:
        """Why a model could not be loaded, in one line; "" if the log has no such line."""
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
        """Read to the end in any case: a server blocks when its pipe is full."""
        try:
            for line in stream:
                line = line.rstrip("\n")
                if not self._lines:
                    began()
                self._lines.append(line)
                if len(self._bad_option) == 1:
                    self._bad_option.append(line)
                elif found := BAD_OPTION.search(line):
                    self._bad_option = [found[2]] if found[2] else ["tritonserver", found[1]]
                if self._file:
                    self._file.write(line)
                if self._losses is not None and not self._hushed:
                    self._losses.note(line)
                if self._verbose or (self._is_loud(line) and not self._hushed):
                    self._tell(line)
                elif line.startswith(TO_USER):
                    self._tell(line.removeprefix(TO_USER))
                elif (found := ABOUT_ENGINE.match(line)) and found[1] not in self._about_engine:
                    self._about_engine.add(found[1])
                    self._tell(found[1])
        finally:
            stream.close()
            if self._file:
                self._file.close()

    def _is_loud(self, line: str) -> bool:
        """Whether a line is an error or continues one."""
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
    """A reason from the log without the exception's name before it and the traceback after it."""
    return re.sub(r"^TritonModelException: ", "", reason.partition(r"\n\nAt:")[0].rstrip('"'))
