"""Missing and wrong pieces of an installation are one sentence each that names the remedy."""

from __future__ import annotations

import errno
import os
import platform
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.main import get_command

from inflight import log_output
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.launchers.external import ExternalLauncher
from inflight.executor.launchers.mpi import Mpi
from inflight.executor.wire.launch import Launch
from inflight.free_port import EPHEMERAL
from inflight.mpi_launcher import INTERFACE_VARIABLES, find_launcher, launcher_environment
from inflight.run_directory import RUN_DIRECTORY
from inflight.supervisor import installation, mpi, ports
from inflight.supervisor.log import ServerLog
from inflight.supervisor.log_file import LogFile
from inflight.supervisor.metrics import count_in_flight
from inflight.supervisor.options import ServeOptions
from inflight.supervisor.processes import STUB
from inflight.supervisor.serve import serve
from inflight_client.cli import app


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_an_old_glibc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.31"))
    with pytest.raises(ConfigurationError, match=r"needs glibc 2\.35 or newer, this system has 2\.31"):
        installation.check_machine()


def test_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigurationError, match="x86-64 Linux, this is Linux on aarch64"):
        installation.check_machine()


def test_the_libpython_found_is_this_interpreters_own() -> None:
    library = installation.find_libpython()
    assert library.name == installation.libpython_name()
    assert installation._version_of(library) == platform.python_version()


def test_no_libpython_says_what_to_install(tmp_path: Path) -> None:
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(ConfigurationError, match=rf"there is no {name}\.so\.1\.0: install the package {name}"):
        installation.find_libpython([tmp_path])


def test_a_libpython_of_another_patch_release_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / installation.libpython_name()).touch()
    monkeypatch.setattr(installation, "_version_of", lambda library: "3.99.1")
    with pytest.raises(ConfigurationError, match=r"is Python 3\.99\.1's"):
        installation.find_libpython([tmp_path])


def test_tritonserver_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="is not an executable"):
        installation.find_tritonserver(tmp_path / "tritonserver")
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(installation, "IMAGE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"tritonserver is not installed: run inflight install-server, or"):
        installation.find_tritonserver()
    on_path = executable(tmp_path / "tritonserver")
    assert installation.find_tritonserver() == on_path
    in_image = executable(tmp_path / "bin" / "tritonserver")
    assert installation.find_tritonserver() == in_image


def test_a_stub_for_another_python_is_refused(tmp_path: Path) -> None:
    stub = executable(tmp_path / "backends" / "python" / STUB, "… libpython3.2.so.1.0 …")
    with pytest.raises(ConfigurationError, match=r"runs Python 3\.2, but inflight is installed in"):
        installation.find_stub(tmp_path)
    stub.write_text(f"… {installation.libpython_name()} …")
    assert installation.find_stub(tmp_path) == stub
    of_version = executable(tmp_path / "python_backend_stubs" / installation.PYTHON / STUB)
    assert installation.find_stub(tmp_path) == of_version


def test_the_layout_gives_the_stub_this_interpreter(tmp_path: Path) -> None:
    """Also where the wheel's stub asks for a libpython under a name that the wheel made up."""
    wheel = tmp_path / "wheel"
    for name in ("libpython3-419a3a08.13.so.1.0", "libcudart-0.so.12"):
        executable(wheel / "nvidia_pytriton.libs" / name)
    own = executable(tmp_path / "own" / installation.libpython_name())
    pieces = installation.Installation(
        tritonserver=executable(wheel / "pytriton" / "tritonserver" / "bin" / "tritonserver"),
        python_backend=executable(wheel / "python" / "libtriton_python.so").parent,
        stub=executable(wheel / "stubs" / STUB, "the stub"),
        libraries=wheel / "nvidia_pytriton.libs",
        libpython=own,
        model_py=executable(wheel / "backend" / "model.py"),
    )
    backends, variables = pieces.lay_out(tmp_path / "run")
    stub = (backends / "python" / STUB).resolve()
    libraries = stub.parents[4] / "nvidia_pytriton.libs"
    assert stub.read_text() == "the stub"
    assert (libraries / "libpython3-419a3a08.13.so.1.0").resolve() == own
    assert (libraries / installation.libpython_name()).resolve() == own
    assert (libraries / "libcudart-0.so.12").resolve() == wheel / "nvidia_pytriton.libs" / "libcudart-0.so.12"
    assert (backends / "inflight" / "model.py").exists()
    assert (backends / "python" / "libtriton_python.so").exists()
    assert variables["LD_LIBRARY_PATH"].split(":")[0] == str(libraries)
    assert variables["PATH"].split(":")[0] == str(Path(sys.executable).parent)


class TestMpi:
    @pytest.mark.parametrize("one_host", [True, False])
    def test_the_environments_own_pair_fits(self, one_host: bool) -> None:
        assert mpi.check_mpi(one_host=one_host)

    def test_what_is_tried_is_what_launches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[list[str]] = []

        def note(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            tried.append(command)
            return subprocess.CompletedProcess(command, 0, "size 2 MPI\nsize 2 MPI\n", "")

        config = EngineConfig(tensor_parallel_size=2)
        (command,) = Mpi(config).commands(Launch.of(Path("/nowhere"), config, Mpi.joining))
        launched = command.arguments
        monkeypatch.setattr(mpi.subprocess, "run", note)
        mpi.check_mpi()
        own = launched.index(sys.executable)
        assert tried[-1][: own + 1] == launched[: own + 1]

    @pytest.mark.parametrize(
        ("script", "sentence"),
        [
            (
                "for rank in 1 2; do echo size 1 Open MPI v4; done",
                r"does not belong to mpi4py's MPI library \(Open MPI v4",
            ),
            ("echo PMIx server not found >&2; exit 1", "does not belong to mpi4py's MPI library: install"),
            ("echo \"ModuleNotFoundError: No module named 'mpi4py'\" >&2; exit 1", "mpi4py is not installed: install"),
            ("echo 'RuntimeError: cannot load MPI library' >&2; exit 1", "mpi4py finds no MPI library: install"),
        ],
    )
    def test_a_launcher_of_another_mpi(self, tmp_path: Path, script: str, sentence: str) -> None:
        launcher = executable(tmp_path / "mpiexec", f"#!/bin/sh\n{script}\n")
        with pytest.raises(ConfigurationError, match=sentence):
            mpi.check_mpi(launcher)

    @pytest.mark.parametrize("one_host", [True, False])
    def test_no_launcher(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_host: bool) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        with pytest.raises(ConfigurationError, match=r"no MPI launcher \(mpiexec\) here: install mpich and mpi4py"):
            mpi.check_mpi(one_host=one_host)

    def test_the_environments_own_launcher_goes_before_one_on_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path / "path"))
        on_path = executable(tmp_path / "path" / "mpiexec.gforker")
        assert find_launcher(tmp_path / "own" / "python", one_host=True) == on_path
        own = executable(tmp_path / "own" / "mpiexec")
        assert find_launcher(tmp_path / "own" / "python", one_host=True) == own

    def test_an_outer_jobs_variables_are_not_handed_on(self) -> None:
        inherited = {"PMI_RANK": "5", "OMPI_COMM_WORLD_SIZE": "9", "HOME": "/home"}
        assert launcher_environment(inherited, one_host=False) == {"HOME": "/home"}
        assert launcher_environment(inherited, one_host=True)["UCX_TLS"] == "self,posix"

    @pytest.mark.parametrize(("one_host", "interface", "named"), [(True, "", "lo"), (False, "eth1", "eth1")])
    def test_ranks_talk_through_the_named_interface_alone(self, one_host: bool, interface: str, named: str) -> None:
        environment = launcher_environment({}, one_host=one_host, interface=interface)
        assert {environment[variable] for variable in INTERFACE_VARIABLES} == {named}


class TestPorts:
    def test_zero_takes_different_free_ports(self) -> None:
        chosen = ports.claim({"HTTP": ("127.0.0.1", 0), "gRPC": ("127.0.0.1", 0), "metrics": ("127.0.0.1", 0)})
        assert len({*chosen.values(), 0}) == 4
        first_ephemeral = int(EPHEMERAL.read_text().split()[0])
        assert max(chosen.values()) < first_ephemeral, "a connection may take one before its server listens"

    def test_a_taken_port_is_named(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigurationError, match=f"gRPC port {port} on 127.0.0.1 is taken.*--grpc-port"):
                ports.claim({"HTTP": ("127.0.0.1", 0), "gRPC": ("127.0.0.1", port)})

    def test_the_same_port_twice(self) -> None:
        (port,) = ports.claim({"HTTP": ("127.0.0.1", 0)}).values()
        with pytest.raises(ConfigurationError, match=f"metrics port {port} .* is taken"):
            ports.claim({"HTTP": ("127.0.0.1", port), "metrics": ("127.0.0.1", port)})

    def test_an_address_that_is_none(self) -> None:
        with pytest.raises(ConfigurationError, match="not an address"):
            ports.claim({"HTTP": ("no.such.host.invalid", 80)})


def test_what_is_wrong_is_one_line_and_exit_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert serve(ServeOptions(checkpoint=tmp_path, http_port=0, grpc_port=0, metrics_port=0)) == 2
    assert capfd.readouterr().err == f"inflight: {tmp_path} is not a Hugging Face checkpoint: it has no config.json\n"


PIP = frozenset({"--no-deps", "--no-input", "--force-reinstall", "--disable-pip-version-check"})
OTHER_PROGRAMS = PIP | {"--enable-shared", "--version", "--local-dir"}
"""Options of pip, of Python's own build, of launchers, and of the hub's command line."""


def test_every_option_that_a_sentence_names_exists() -> None:
    commands = get_command(app).commands
    options = {
        option
        for name in ("serve", "openai")
        for parameter in commands[name].params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    folder = Path(installation.__file__).parent
    named = set()
    for path in folder.glob("*.py"):
        if path.name in ("plan.py", "api_key.py", "backend_directory.py"):  # they write tritonserver's command line
            continue
        named |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", path.read_text()))
    assert {"--tritonserver", "--verbose", "--ready-timeout"} <= named
    assert named <= options | OTHER_PROGRAMS
    for purpose in ("HTTP", "gRPC", "metrics"):
        assert f"--{purpose.lower()}-port" in options


class TestLog:
    LINES = (
        'I1121 08:00:00.000001 7 server.cc:1] "starting"\n'
        'E1121 08:00:00.000002 7 server.cc:241] "CudaDriverHelper has not been initialized."\n'
        "a library's chatter\n"
        "2026-11-21 ERROR inflight.worker: rank 1 is lost\n"
        "  with a line that goes on\n"
        'I1121 08:00:00.000003 7 x.cc:1] "fine"\n'
        "E1121 08:00:00.000004 7 model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: "
        'TritonModelException: no such layer\\n\\nAt:\\n  model.py(28)"\n'
    )

    def told(
        self,
        *,
        verbose: bool,
        starting: bool = False,
        ending: bool = False,
        lines: Sequence[str] = tuple(LINES.splitlines()),
    ) -> tuple[list[str], ServerLog]:
        told: list[str] = []
        log = ServerLog(told.append, verbose=verbose)
        reading, writing = os.pipe()
        log.follow(os.fdopen(reading))
        if not starting:
            log.tell_errors()
        if ending:
            log.hush_errors()
        with os.fdopen(writing, "w") as stream:
            stream.write("".join(f"{line}\n" for line in lines))
        log.join(60)
        return told, log

    def test_only_errors_are_told(self) -> None:
        told, log = self.told(verbose=False)
        assert [line.split()[-1] for line in told] == ["lost", "on", 'model.py(28)"']
        assert log.load_failure() == "model llm cannot be loaded: no such layer"

    def test_what_the_engine_is_is_told_once(self) -> None:
        slow = "the layers run in torch, several times slower: this processor has no AVX-512 for bfloat16"
        engine = "engine llm: LlamaForCausalLM on cpu (CPU), native layers; 2 ranks"
        wide = "the checkpoint is in bfloat16 and is computed in float32 (dtype is auto): a reason"
        lines = [
            *(f"I1121 08:00:00.001 rank {rank} inflight.runtime.device] {wide}" for rank in range(2)),
            *(f"I1121 08:00:00.001 rank {rank} inflight.models.compiled] {slow}" for rank in range(2)),
            "I1121 08:00:00.001 rank 0 inflight.worker] ready",
            f"I1121 08:00:00.001 inflight.server.start] {engine}",
            f"  I1121 08:00:00.001 inflight.server.start] {engine} that a client wrote",
        ]
        assert self.told(verbose=False, starting=True, lines=lines)[0] == [wide, slow, engine]
        assert self.told(verbose=True, lines=lines)[0] == lines

    def test_what_ranks_are_waited_for_and_how_to_start_them_is_told_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
        config = EngineConfig(executor="external", worker_start_timeout_ms=90_000)
        for _ in range(2):  # the first front, and the one of a stub that was started again
            launcher = ExternalLauncher(config, "llm")
            assert launcher.open() is launcher.open() is None
        lines = [log_output._Formatter().format(record) for record in caplog.records]
        assert len(lines) == 2 and self.told(verbose=False, starting=True, lines=lines)[0] == [
            "no ranks serve the engine llm here: start them, with python -m inflight.worker --config FOLDER under "
            "mpiexec, torchrun or srun; waiting until --ready-timeout, 90 s at most (worker_start_timeout_ms)"
        ]

    def test_a_start_that_fails_is_told_by_its_reason_alone(self) -> None:
        told, log = self.told(verbose=False, starting=True)
        assert told == []
        assert log.load_failure() == "model llm cannot be loaded: no such layer"

    def test_errors_of_a_server_that_is_being_ended_are_not_told(self) -> None:
        assert self.told(verbose=False, ending=True)[0] == []

    @pytest.mark.parametrize(
        ("lines", "reason"),
        [
            (["/bin/tritonserver: unrecognized option '--no'"], "tritonserver: unrecognized option '--no'"),
            (
                ['Bad option: "--rate-limit".', "invalid argument for --rate-limit"],
                "--rate-limit: invalid argument for",
            ),
            (["I1121 08:00:00.000001 7 x.cc:1] an option: fine"], ""),
        ],
    )
    def test_an_option_that_tritonserver_refuses_is_found_before_its_usage(self, lines: list[str], reason: str) -> None:
        log = ServerLog(lambda line: None)
        reading, writing = os.pipe()
        log.follow(os.fdopen(reading))
        with os.fdopen(writing, "w") as stream:
            stream.write("\n".join([*lines, *["  --usage"] * 1000]))
        log.join(60)
        assert log.bad_option().startswith(reason) and bool(log.bad_option()) == bool(reason)

    def test_verbose_tells_all(self) -> None:
        assert self.told(verbose=True)[0] == self.LINES.splitlines()


class TestLogFile:
    def test_a_full_disk_costs_lines_of_the_file_alone(self, tmp_path: Path) -> None:
        """The pipe is read to its end all the same, and the file goes on once there is room."""
        told: list[str] = []
        path = tmp_path / "log"
        path.symlink_to("/dev/full")
        file = LogFile(path, told.append)
        for line in ("lost", "lost too"):
            file.write(line)
        path.unlink()
        file.write("kept")
        file.write("kept too")
        file.close()
        assert path.read_text() == "kept\nkept too\n"
        assert told == [
            f"the log file {path} cannot be written (No space left on device): lines are lost until it can",
            f"the log file {path} is written again; 2 lines were lost",
        ]

    def test_a_servers_output_is_read_to_its_end(self) -> None:
        told: list[str] = []
        log = ServerLog(told.append, file=Path("/dev/full"))
        reading, writing = os.pipe()
        log.follow(os.fdopen(reading))
        with os.fdopen(writing, "w") as stream:
            stream.write("line\n" * 100_000)
        log.join(60)
        assert len(told) == 1 and "No space left on device" in told[0]

    def test_one_that_cannot_be_made_is_told_before_anything_starts(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "nowhere" / "log"
        assert serve(ServeOptions(log_file=path, http_port=0, grpc_port=0, metrics_port=0)) == 2
        told = capfd.readouterr().err
        assert told == f"inflight: --log-file {path} cannot be written: No such file or directory\n"


class TestTemporaryFolder:
    def told(self, capsys: pytest.CaptureFixture[str]) -> str:
        assert serve(ServeOptions(http_port=0, grpc_port=0, metrics_port=0)) == 2
        return capsys.readouterr().err

    def test_one_that_cannot_be_written_is_one_sentence(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        assert re.fullmatch(
            rf"inflight: .* cannot be made in {tmp_path}/nowhere \(No such .*\): .* with TMPDIR\n", self.told(capsys)
        )

    def test_none_at_all_is_one_sentence(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def none_usable() -> str:
            raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_get_default_tempdir", none_usable)
        assert re.fullmatch(r"inflight: .* \(No usable .*\): .* with TMPDIR\n", self.told(capsys))

    def test_a_full_one_is_one_sentence_and_left_empty(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def full(source: Path, target: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(installation.shutil, "copy2", full)
        assert re.fullmatch(rf"inflight: .* in {tmp_path} \(No space .*\): .* with TMPDIR\n", self.told(capsys))
        assert list(tmp_path.iterdir()) == []


def test_requests_in_flight_are_summed_over_models() -> None:
    text = (
        "# HELP nv_trt_llm_request_metrics Requests\n"
        'nv_trt_llm_request_metrics{model="llm",request_type="active",version="1"} 3.000000\n'
        'nv_trt_llm_request_metrics{model="llm",request_type="max",version="1"} 64\n'
        'nv_trt_llm_request_metrics{model="llm",request_type="waiting",version="1"} 2\n'
    )
    assert count_in_flight(text) == 5
    assert count_in_flight("nv_inference_count 3\n") is None


def test_requests_of_a_killed_stub_are_not_in_flight() -> None:
    line = 'nv_trt_llm_request_metrics{{model="llm",pid="{}",request_type="active",version="1"}} {}\n'
    assert count_in_flight(line.format(11, 3) + line.format(12, 4), lambda pid: pid == 12) == 4
