"""Both wheels that `make dist` builds, each in a fresh environment: the engine's serves, the client's talks to it.

The server is their own: no other test has one that runs from a wheel.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from fresh_environment import PATIENCE, FreshEnvironment

from inflight.supervisor.install_server import PACKAGE

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = json.loads((ROOT / "ci" / "golden" / "default_model.json").read_text())[0]

PROGRAM = """
import importlib.util, json, sys
from inflight_client import Client

with Client(sys.argv[1]) as client:
    client.wait_until_ready(300)
    pieces = [chunk.text for chunk in client.stream(sys.argv[2], max_tokens=48, temperature=0.0)]
print(json.dumps({"pieces": pieces, "engine": [bool(importlib.util.find_spec(n)) for n in ("torch", "inflight")]}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution -> its wheel."""
    folder = tmp_path_factory.mktemp("dist")
    # The environment that runs the tests is not brought up to date meanwhile.
    command = ["make", "--assume-old=.venv/.ready", "dist", f"DIST={folder}", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.name.split("-")[0]: path for path in folder.glob("*.whl")}
    assert found.keys() == {"inflight", "inflight_client"} and len(list(folder.glob("*.tar.gz"))) == 2
    return found


@pytest.fixture(scope="module")
def engine(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    """Without tritonserver."""
    made = FreshEnvironment(tmp_path_factory.mktemp("engine") / "venv")
    made.install(wheels["inflight"])
    return made


@pytest.fixture(scope="module")
def client(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    made = FreshEnvironment(tmp_path_factory.mktemp("client") / "venv")
    made.install(wheels["inflight_client"])
    return made


@contextlib.contextmanager
def serving(engine: FreshEnvironment, grpc_port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    ports = ("--http-port", "0", "--metrics-port", "0", "--grpc-port", str(grpc_port))
    own = ("--no-demo", "--adopt-timeout", "0", "--log-file", str(log))
    with log.with_suffix(".told").open("wb") as told:
        process = subprocess.Popen(
            [str(engine.programs / "inflight"), "serve", *ports, *own],
            cwd=log.parent,
            env=engine.environment(),
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)


def test_a_completion_streams_from_one_wheel_to_the_other(
    engine: FreshEnvironment, client: FreshEnvironment, tmp_path: Path
) -> None:
    missing = engine.run("inflight", "serve")
    sentence = "tritonserver is not installed: run inflight install-server, or name its binary with --tritonserver"
    assert (missing.returncode, missing.stderr) == (2, f"inflight: {sentence}\n")
    engine.link([PACKAGE])  # as pip would have fetched it
    for _ in range(2):
        installed = engine.run("inflight", "install-server")
        assert (installed.returncode, installed.stderr) == (0, "")
        assert installed.stdout.startswith(f"tritonserver is installed already: {engine.programs.parent}/")

    port, log = free_port(), tmp_path / "server.log"
    with serving(engine, port, log) as process:
        talked = client.run("python", "-c", PROGRAM, f"127.0.0.1:{port}", GOLDEN["prompt"], timeout=2 * PATIENCE)
        assert talked.returncode == 0, talked.stderr + log.with_suffix(".told").read_text() + log.read_text()[-4000:]
        told = json.loads(talked.stdout)
        assert "".join(told["pieces"]) == GOLDEN["text"] and len(told["pieces"]) > 1
        assert told["engine"] == [False, False], "the client's environment has an engine"
        named = ("--url", f"127.0.0.1:{port}", "--temperature", "0", "--max-tokens", "48")
        generated = client.run("inflight", "generate", GOLDEN["prompt"], *named)
        assert (generated.stdout, generated.stderr) == (GOLDEN["text"] + "\n", "")
        assert process.poll() is None


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("serve", "the engine is not installed beside this client: No module named 'inflight'"),
        ("install-server", "the engine is not installed beside this client: No module named 'inflight'"),
        ("load-test", "aiohttp is not installed: pip install 'inflight-client[load-test]'"),
    ],
)
def test_the_clients_wheel_says_what_it_does_not_have(client: FreshEnvironment, command: str, sentence: str) -> None:
    done = client.run("inflight", command)
    assert (done.returncode != 0, done.stderr) == (True, f"inflight: {sentence}\n")


def test_perf_analyzer_starts_without_tritonserver_or_says_which_libraries_are_missing(
    client: FreshEnvironment,
) -> None:
    """The second where the system has none."""
    done = client.run("inflight", "perf-analyzer", "--version")
    told = (
        "Perf Analyzer Version 2.51.0" if done.returncode == 0 else "inflight: perf_analyzer does not start without lib"
    )
    assert done.stderr.startswith(told)
