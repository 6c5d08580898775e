"""A process that answers each line of JSON on its stdin with one on its stdout."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any


class LineProcess:
    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, errors: IO[str] | None = None
    ) -> None:
        """`env`: None = this process's. `errors`: takes its stderr, which is this process's otherwise."""
        self._process = subprocess.Popen(
            list(command), env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        self.pid = self._process.pid

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RuntimeError where the process ends instead of answering."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """What it says by itself. Raises RuntimeError where it ends instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it, whether it listens or not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
