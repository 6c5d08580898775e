"""What other users of the machine must not see: the API key, the log, and the regions that prompts pass through."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from inflight.errors import ConfigurationError
from inflight.supervisor import shared_memory
from inflight.supervisor.api_key import ApiKey
from inflight.supervisor.log_file import LogFile
from inflight.supervisor.shared_memory import SHARED_MEMORY, RegionGuard


class TestApiKey:
    def test_a_key_of_its_own_is_never_the_same(self) -> None:
        keys = {ApiKey.choose(open_apis=False, file=None).value for _ in range(10)}
        assert len(keys) == 10 and all(len(key) == 64 for key in keys)

    def test_it_closes_the_apis_over_both_protocols(self) -> None:
        key = ApiKey("k" * 16)
        for argument in key.arguments:
            _, apis, header = argument.replace(":", "=", 1).split("=", 2)
            assert set(apis.split(",")) == {"model-repository", "shared-memory", "logging", "trace"}
            assert header == f"inflight-api-key={key.value}"
        assert [argument.split("=")[0] for argument in key.arguments] == [
            "--http-restricted-api",
            "--grpc-restricted-protocol",
        ]
        assert key.grpc_headers == {"triton-grpc-protocol-inflight-api-key": key.value}

    def test_open_apis_have_none(self) -> None:
        key = ApiKey.choose(open_apis=True, file=None)
        assert (key.arguments, key.grpc_headers) == ((), {})
        key.hide(os.getpid())

    def test_an_operators_key_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "key"
        file.write_text("a-key-of-my-own.2\n")
        assert ApiKey.choose(open_apis=False, file=file).value == "a-key-of-my-own.2"

    @pytest.mark.parametrize("text", ["", "short", "a key with blanks in it", "one,two,three,four,five", "k" * 257])
    def test_a_file_without_a_key_is_refused(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "key"
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=f"--api-key-file {file} holds no key") as caught:
            ApiKey.choose(open_apis=False, file=file)
        assert not text or text not in str(caught.value)

    def test_what_cannot_be_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="cannot be read"):
            ApiKey.choose(open_apis=False, file=tmp_path / "nowhere")
        with pytest.raises(ConfigurationError, match="exclude each other"):
            ApiKey.choose(open_apis=True, file=tmp_path / "key")

    def test_it_is_written_over_in_a_command_line(self) -> None:
        key = ApiKey.choose(open_apis=False, file=None)
        program = "import sys; print('read', flush=True); sys.stdin.read(); print(*sys.argv[1:])"
        with subprocess.Popen(
            [sys.executable, "-c", program, *key.arguments, "last"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            command_line = Path(f"/proc/{process.pid}/cmdline")
            before = command_line.read_bytes()
            assert before.count(key.value.encode()) == 2
            key.hide(process.pid)
            assert command_line.read_bytes() == before.replace(key.value.encode(), b"x" * 64)
            answer, _ = process.communicate()
        # What the program had read already is its own.
        assert answer.decode().split() == [*key.arguments, "last"]


class TestLogFile:
    @pytest.fixture(autouse=True)
    def open_umask(self) -> Iterator[None]:
        before = os.umask(0)
        yield
        os.umask(before)

    def test_one_that_is_made_is_this_users_alone(self, tmp_path: Path) -> None:
        file = LogFile(tmp_path / "log", print)
        file.write("line")
        file.close()
        assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600

    def test_one_that_is_there_keeps_its_mode(self, tmp_path: Path) -> None:
        (tmp_path / "log").touch(0o640)
        file = LogFile(tmp_path / "log", print)
        file.write("line")
        file.close()
        assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o640


class TestRegions:
    @pytest.fixture
    def prefix(self) -> Iterator[str]:
        prefix = f"inflight_test_{os.getpid()}_"
        yield prefix
        shared_memory.remove(prefix)
        assert not list(SHARED_MEMORY.glob(f"{prefix}*"))

    def make(self, name: str) -> Path:
        """As tritonserver does: its mode is set in a second step, against any umask."""
        region = SHARED_MEMORY / name
        descriptor = os.open(region, os.O_CREAT | os.O_RDWR, 0o644)
        os.fchmod(descriptor, 0o644)
        os.close(descriptor)
        return region

    @pytest.mark.parametrize("has_inotify", [True, False])
    def test_they_are_narrowed_as_they_appear(
        self, prefix: str, has_inotify: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not has_inotify:
            monkeypatch.setattr(shared_memory, "_watch", lambda folder: None)
        monkeypatch.setattr(shared_memory, "POLL", 0.01 if not has_inotify else 3600.0)
        with RegionGuard(prefix):
            for number in range(3):
                region = self.make(f"{prefix}{number}")
                until(lambda region=region: stat.S_IMODE(region.stat().st_mode) == 0o600)

    def test_those_of_others_are_let_alone(self, prefix: str) -> None:
        others = self.make(f"other_{prefix}")
        try:
            with RegionGuard(prefix):
                own = self.make(f"{prefix}0")
                until(lambda: stat.S_IMODE(own.stat().st_mode) == 0o600)
                assert stat.S_IMODE(others.stat().st_mode) == 0o644
        finally:
            others.unlink()

    def test_a_link_that_somebody_laid_there_is_not_followed(self, prefix: str, tmp_path: Path) -> None:
        own = tmp_path / "own"
        own.touch(0o644)
        (SHARED_MEMORY / f"{prefix}link").symlink_to(own)
        self.make(f"{prefix}region")
        shared_memory.narrow(prefix)
        assert stat.S_IMODE(own.stat().st_mode) == 0o644
        assert stat.S_IMODE((SHARED_MEMORY / f"{prefix}region").stat().st_mode) == 0o600
