"""Both wheels that `make dist` builds, each in a fresh environment: the engine's serves without a compiler, and the
client's talks to it.

The server is their own: no other test has one that runs from a wheel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from fresh_environment import PATIENCE, FreshEnvironment

from inflight.supervisor.install_server import PACKAGE
from inflight_kernels.cpu import unsupported_reason
from inflight_kernels.cpu.library import prebuilt_name
from inflight_kernels.cpu.prebuilt import sources

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


LOADING = """
import torch
from inflight_kernels.cpu import load_library

print(load_library(torch.float32).functions._name)
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}))
"""

VARIANTS = "none" if unsupported_reason() else "here"
"""What `make dist` builds ahead: all others would take a minute more."""
needs_library = pytest.mark.skipif(VARIANTS == "none", reason=f"cannot compile here: {unsupported_reason()}")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution -> its wheel."""
    folder = tmp_path_factory.mktemp("dist")
    # The environment that runs the tests is not brought up to date meanwhile.
    command = ["make", "--assume-old=.venv/.ready", "dist", f"DIST={folder}", f"VARIANTS={VARIANTS}"]
    command.append(f"BIN={Path(sys.executable).parent}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.name.split("-")[0]: path for path in folder.glob("*.whl")}
    assert found.keys() == {"inflight", "inflight_client"} and len(list(folder.iterdir())) == 4
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
    engine: FreshEnvironment, client: FreshEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch, tmp_path)
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
        assert VARIANTS == "none" or "the layers are compiled for " in log.read_text()


def without_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Nor with what was compiled before. tritonserver starts its stubs by bash."""
    bash = shutil.which("bash")
    assert bash is not None
    (folder / "bin").mkdir()
    (folder / "bin" / "bash").symlink_to(bash)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(folder / "cache"))


@needs_library
def test_the_engines_wheel_has_libraries_and_the_clients_is_for_any_machine(wheels: dict[str, Path]) -> None:
    expected = {
        f"inflight_kernels/cpu/libraries/{prebuilt_name(each.name, each.options)}" for each in sources(VARIANTS)
    }
    with zipfile.ZipFile(wheels["inflight"]) as packed:
        assert {name for name in packed.namelist() if name.endswith(".so")} == expected
    assert wheels["inflight"].name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert wheels["inflight_client"].name.endswith("-py3-none-any.whl")


@needs_library
def test_a_library_of_the_wheel_has_torchs_threads(
    engine: FreshEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second libgomp would have others, which fight torch's for the cores."""
    without_compiler(monkeypatch, tmp_path)
    done = engine.run("python", "-c", LOADING)
    assert done.returncode == 0, done.stderr
    library, libgomp = done.stdout.splitlines()
    assert Path(library).is_relative_to(engine.programs.parent) and Path(library).parent.name == "libraries"
    assert len(libgomp.split()) == 1


@needs_library
def test_a_library_of_the_wheel_asks_for_no_newer_system_than_torch(wheels: dict[str, Path], tmp_path: Path) -> None:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    theirs = newest(Path(found.origin).parent / "lib" / "libtorch_cpu.so")
    with zipfile.ZipFile(wheels["inflight"]) as packed:
        for name in packed.namelist():
            if name.endswith(".so"):
                ours = newest(Path(packed.extract(name, tmp_path)))
                stated = {
                    "GLIBC": (2, 17) if platform.machine() == "aarch64" else (2, 14),
                    "GOMP": (4, 5),
                    "OMP": (1, 0),
                }
                assert all(version <= stated.get(family, theirs[family]) for family, version in ours.items()), ours


def newest(library: Path) -> dict[str, tuple[int, ...]]:
    """Family of symbols -> the newest version that the library asks for."""
    command = ["readelf", "--version-info", "--wide", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    needs = done.stdout.partition("Version needs section")[2]
    found: dict[str, tuple[int, ...]] = {}
    for family, version in re.findall(r"Name: ([A-Z]+)_([\d.]+)", needs):
        found[family] = max(found.get(family, ()), tuple(map(int, version.split("."))))
    return found


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
