"""How the next `inflight serve` finds a server, and which of them it takes for its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from inflight import abandonment
from inflight.abandonment import Supervised
from inflight.openai_options import OpenAIOptions
from inflight.supervisor import adoption, repository, server_record
from inflight.supervisor.adopted_process import UNKNOWN, AdoptedProcess
from inflight.supervisor.adoption import who_holds
from inflight.supervisor.api_key import ApiKey
from inflight.supervisor.janitor import end_now
from inflight.supervisor.janitor_process import JANITOR, SUPERVISOR
from inflight.supervisor.options import ServeOptions
from inflight.supervisor.ports import PortTaken
from inflight.supervisor.process_id import ProcessId
from inflight.supervisor.repository import ServedRepository
from inflight.supervisor.server_record import ServerRecord, describe, pid_namespace

KEY = ApiKey("k" * 16)
GONE = ProcessId(os.getpid(), 0)
"""A pid that is another process's now."""


@pytest.fixture
def served(tmp_path: Path) -> ServedRepository:
    folder = tmp_path / "source" / "toy"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "python"')
    return repository.write(tmp_path / "source", tmp_path / "served")


class TestConfiguration:
    def test_what_only_a_supervisor_knows_does_not_count(self, served: ServedRepository) -> None:
        other = ServeOptions(verbose=True, log_file=Path("log"), adopt_timeout=1.0, drain_timeout=1.0)
        assert describe(ServeOptions(), served, KEY) == describe(other, served, KEY)

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("checkpoint", {"checkpoint": Path("elsewhere")}),
            ("parameters", {"parameters": {"dtype": "float32"}}),
            ("grpc_port", {"grpc_port": 9}),
            ("openai", {"openai": OpenAIOptions(port=9)}),
            ("server_arguments", {"server_arguments": ("--log-verbose=1",)}),
        ],
    )
    def test_every_other_option_counts(self, served: ServedRepository, name: str, change: dict[str, object]) -> None:
        record = record_of(describe(ServeOptions(), served, KEY))
        assert name in record.differences(describe(replace(ServeOptions(), **change), served, KEY))

    def test_the_drain_timeout_counts_where_the_openai_server_has_it(self, served: ServedRepository) -> None:
        options = ServeOptions(openai=OpenAIOptions())
        record = record_of(describe(options, served, KEY))
        assert record.differences(describe(replace(options, drain_timeout=1.0), served, KEY)) == ["drain_timeout"]

    def test_another_config_pbtxt_counts(self, served: ServedRepository) -> None:
        record = record_of(describe(ServeOptions(), served, KEY))
        (served.path / "toy" / "config.pbtxt").write_text('backend: "python" max_batch_size: 1')
        assert record.differences(describe(ServeOptions(), served, KEY)) == ["the config.pbtxt of toy"]

    def test_another_key_in_the_same_file_counts(self, served: ServedRepository, tmp_path: Path) -> None:
        options = ServeOptions(api_key_file=tmp_path / "key")
        record = record_of(describe(options, served, KEY))
        assert record.differences(describe(options, served, ApiKey("l" * 16))) == ["api_key_file"]
        # Without a file each server has a key of its own.
        assert describe(ServeOptions(), served, KEY) == describe(ServeOptions(), served, ApiKey("l" * 16))


def record_of(configuration: dict[str, str]) -> ServerRecord:
    return ServerRecord(
        configuration=configuration,
        namespace=pid_namespace(),
        prefix=f"inflight_test_{os.getpid()}_",
        command=["tritonserver"],
        variables={},
        endpoints={"gRPC": "127.0.0.1:8001", "metrics": "127.0.0.1:8002"},
        api_key="k" * 16,
    )


Make = Callable[..., Path]


class TestFinding:
    @pytest.fixture
    def make(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
        """Makes the run directory of a server, in a temporary folder that no other server uses."""
        monkeypatch.setattr(adoption.tempfile, "gettempdir", lambda: str(tmp_path))
        locks: list[Supervised] = []

        def make(*, mode: int = 0o700, janitor: ProcessId, is_supervised: bool = True, **changes: str) -> Path:
            run_directory = tmp_path / "inflight-made"
            run_directory.mkdir()
            run_directory.chmod(mode)
            record = structs.replace(record_of({"dtype": "auto"}), **changes)
            record.write(run_directory)
            GONE.write(run_directory / SUPERVISOR)
            janitor.write(run_directory / JANITOR)
            locks.append(Supervised(run_directory, end_now(run_directory, record.prefix)))
            if not is_supervised:
                locks.pop().release()
            return run_directory

        yield make
        for lock in locks:
            lock.release()

    @pytest.fixture
    def itself(self) -> ProcessId:
        return ProcessId.of(os.getpid())

    def test_a_server_is_found_with_its_supervisor_or_without(self, make: Make, itself: ProcessId) -> None:
        run_directory = make(janitor=itself)
        (server,) = adoption.find()
        assert (server.run_directory, server.supervisor, server.janitor) == (run_directory, None, itself.pid)
        itself.write(run_directory / SUPERVISOR)
        assert server.supervisor == itself.pid

    def test_what_others_may_have_put_there_is_not_read(self, make: Make, itself: ProcessId) -> None:
        make(mode=0o755, janitor=itself)
        assert adoption.find() == []

    def test_a_server_of_another_container_is_let_alone(self, make: Make) -> None:
        run_directory = make(janitor=GONE, namespace="pid:[1]")
        assert adoption.find() == []
        assert run_directory.exists()

    @pytest.mark.slow
    @pytest.mark.parametrize("namespace", [pid_namespace(), "pid:[1]"])
    def test_what_nobody_attends_to_is_removed(self, make: Make, namespace: str) -> None:
        run_directory = make(janitor=GONE, is_supervised=False, namespace=namespace)
        assert adoption.find() == []
        assert not run_directory.exists()

    def test_what_another_machine_may_attend_to_is_let_alone(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_directory = make(janitor=GONE, is_supervised=False)
        (tmp_path / "boot").write_text("another kernel")
        monkeypatch.setattr(abandonment, "BOOT", tmp_path / "boot")
        assert len(adoption.find()) == 1 and run_directory.exists()

    @pytest.mark.slow
    def test_a_folder_goes_with_its_owner_however_early_that_is_killed(self, make: Make, tmp_path: Path) -> None:
        program = (
            "import sys; from inflight.supervisor.private_directory import private_directory\n"
            "with private_directory() as folder: print(folder, flush=True); sys.stdin.read()"
        )
        owner = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with owner:
            assert owner.stdout is not None
            folder = Path(owner.stdout.readline().decode().strip())
            assert adoption.find() == [] and folder.is_dir()
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            assert folder.is_dir()
            assert adoption.find() == [] and not folder.exists()

    def test_a_server_whose_processes_could_not_be_noted_is_let_alone(self, make: Make) -> None:
        run_directory = make(janitor=GONE)
        (run_directory / JANITOR).write_text("")
        servers = adoption.find()
        assert len(servers) == 1 and run_directory.exists()
        assert who_holds(PortTaken("gRPC", "127.0.0.1", 8001), {}, servers) == ""

    def test_who_has_a_port_and_what_to_do_is_one_sentence(self, make: Make, itself: ProcessId) -> None:
        run_directory = make(janitor=itself)
        servers = adoption.find()
        taken = PortTaken("gRPC", "127.0.0.1", 8001)
        assert who_holds(taken, {"dtype": "float32"}, servers) == (
            "gRPC port 8001 on 127.0.0.1 is taken by a server whose inflight serve was killed, and which differs in "
            f"dtype: repeat the command that started it to adopt it, or end it with kill {itself.pid}"
        )
        assert who_holds(taken, {"dtype": "auto"}, servers).endswith("is being ended: start again in a moment")
        assert who_holds(PortTaken("gRPC", "127.0.0.1", 800), {}, servers) == ""
        itself.write(run_directory / SUPERVISOR)
        assert who_holds(taken, {}, servers) == (
            f"gRPC port 8001 on 127.0.0.1 is taken by the inflight serve of pid {itself.pid}: stop that, or choose "
            "another with --grpc-port"
        )


def test_on_a_full_disk_no_process_is_named_but_one_that_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, itself = tmp_path / "pid", ProcessId.of(os.getpid())
    GONE.write(file)
    itself.write(file)
    assert ProcessId.read(file) == itself

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_text", fail)
    itself.write(file)
    assert ProcessId.read(file) == itself
    GONE.write(file)
    assert ProcessId.read(file) is None


class TestAdoptedProcess:
    def test_a_pid_that_is_another_processs_now_has_ended(self, tmp_path: Path) -> None:
        GONE.write(tmp_path / "pid")
        process = AdoptedProcess(tmp_path / "pid")
        assert process.poll() == UNKNOWN
        process.kill()
        assert AdoptedProcess(tmp_path / "none").wait(0.0) == UNKNOWN

    @pytest.mark.slow
    def test_one_is_watched_and_ended_that_is_no_child(self, tmp_path: Path) -> None:
        program = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL).pid)"
        pid = int(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout)
        ProcessId.of(pid).write(tmp_path / "pid")
        process = AdoptedProcess(tmp_path / "pid")
        try:
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.0)
        finally:
            process.kill()
        assert process.wait(120.0) == UNKNOWN
        assert process.poll() == UNKNOWN


def test_a_record_of_another_version_is_none(tmp_path: Path) -> None:
    (tmp_path / server_record.FILE).write_text('{"configuration": {}}')
    assert ServerRecord.read(tmp_path) is None
