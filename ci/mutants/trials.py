"""Runs tests on a private copy of the tree, in which one fault at a time is planted.

A mutated program may delete files and kill processes. Where the system lets us, trials therefore see only their own
processes, and can write only to their own folder, /tmp and shared memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = Path(__file__).resolve().parent / "trial_server.py"

FUZZ_EXAMPLES = "20"
"""Random histories that a test tries, also while its lines are recorded."""
HANGS_SECONDS = 60
"""A test that is marked neither slow nor a kernel's fails after so many."""

PRELOADED = (
    *("torch", "transformers", "numpy", "hypothesis", "safetensors.torch", "msgspec", "tokenizers", "jinja2.sandbox"),
    *("triton", "aiohttp.web", "starlette.applications", "httptools", "httpx", "typer", "rich.console", "zmq"),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "xgrammar"),
)
"""What every run of tests needs not import by itself."""

APART = """set -e
mount --bind "$0" "$0"
mount -t tmpfs tmpfs /dev/shm
case "$0" in /tmp/*) mount --bind /tmp /tmp;; *) mount -t tmpfs tmpfs /tmp;; esac
mount -o remount,bind,ro /
exec "$@"
"""
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--propagation", "private")


@dataclass(frozen=True)
class Verdict:
    """What a run of tests said."""

    failed: str | None
    """The test that failed; where a process crashed or took too long, the one that ran; None: all passed."""
    when: str
    why: str
    seconds: float
    tests: int
    """How many were begun."""


class Trials:
    """A private tree below `place`, and the processes that run tests on it."""

    def __init__(self, root: Path, place: Path) -> None:
        """`root`: the checkout that is copied, as it is now."""
        self._place = place.resolve()
        self._tree = self._place / "tree"
        self._servers: dict[bool, subprocess.Popen[str]] = {}
        self._planted = 0
        shutil.rmtree(self._place, ignore_errors=True)
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self._tree / name)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inflight"
        if cache.is_dir():  # compiled C++
            shutil.copytree(cache, self._place / "cache", symlinks=True)
        self.is_apart = self._can_be_apart()

    def _can_be_apart(self) -> bool:
        command = [*UNSHARE, "sh", "-c", APART, str(self._place), "true"]
        try:
            return subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            return False

    def _server(self, interpreted: bool) -> subprocess.Popen[str]:
        if interpreted not in self._servers:
            (self._place / "cache").mkdir(mode=0o700, exist_ok=True)
            environment = {
                **{name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")},
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "INFLIGHT_FUZZ_EXAMPLES": FUZZ_EXAMPLES,
                "INFLIGHT_CACHE_DIR": str(self._place / "cache"),
                "TORCHINDUCTOR_CACHE_DIR": str(self._place / "inductor"),
                "TRITON_CACHE_DIR": str(self._place / "triton"),
                "MPLCONFIGDIR": str(self._place / "matplotlib"),
                **({"TRITON_INTERPRET": "1"} if interpreted else {}),
            }
            environment.pop("PYTHONPATH", None)
            place = self._place / ("interpreted" if interpreted else "compiled")
            place.mkdir()
            (place / "tree").symlink_to(self._tree)
            command = [sys.executable, str(SERVER), str(place), *PRELOADED]
            if self.is_apart:
                command = [*UNSHARE, "sh", "-c", APART, str(self._place), *command]
            log = (place / "server.log").open("w")
            self._servers[interpreted] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        return self._servers[interpreted]

    def run(self, tests: list[str], files: list[str], limit: float, *, interpreted: bool = False) -> Verdict:
        """Run `tests`, which are in `files`, until one fails; all tests of the files if `tests` are none.
        `interpreted`: in a process where triton's interpreter runs the kernels."""
        server = self._server(interpreted)
        assert server.stdin is not None and server.stdout is not None
        request = {"tests": tests, "files": files, "limit": limit, "options": ["-o", f"timeout={HANGS_SECONDS}"]}
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answer: dict[str, Any] = json.loads(server.stdout.readline())
        except (OSError, ValueError):
            name = "interpreted" if interpreted else "compiled"
            log = (self._place / name / "server.log").read_text(errors="replace")
            raise RuntimeError(f"the process that runs the tests ended: {log[-1000:]}") from None
        if "error" in answer:
            raise RuntimeError(f"the tests could not be run: {answer['error']}")
        return Verdict(**{name: answer[name] for name in Verdict.__dataclass_fields__})

    @contextlib.contextmanager
    def planted(self, path: str, source: str) -> Iterator[None]:
        """Meanwhile the file `path` of the private tree holds `source`."""
        file = self._tree / path
        original, times = file.read_bytes(), file.stat()
        # Compiled bytecode is told from newer by seconds and size alone: no two versions may share both.
        self._planted += 1
        file.write_text(source, encoding="utf-8")
        os.utime(file, (times.st_atime, times.st_mtime + self._planted))
        try:
            yield
        finally:
            file.write_bytes(original)
            os.utime(file, (times.st_atime, times.st_mtime))

    def close(self) -> None:
        for server in self._servers.values():
            assert server.stdin is not None
            with contextlib.suppress(OSError):
                server.stdin.close()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        self._servers.clear()
