"""Several fronts on one engine: one launches its ranks, others find them by its name, lose them and find them again."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import fake_rank
import pytest
from calls import Caller, until

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.executor import attach_executor, find_engine_config
from inflight.executor.front.remote import RemoteFront
from inflight.executor.launchers.attached import AttachedLauncher
from inflight.executor.launchers.processes import ProcessLauncher
from inflight.executor.launchers.uniproc import UniProc
from inflight.executor.wire.address import ENGINES, EngineAddress
from inflight.kv_cache_events import KVCacheCreatedData, KVCacheStoredData
from inflight.result import FinishReason
from inflight.run_directory import RUN_DIRECTORY

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(max_batch_size=8, max_num_tokens=64)


@pytest.fixture(autouse=True)
def run_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="run-"))
    monkeypatch.setenv(RUN_DIRECTORY, str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def owner(run_directory: Path) -> Iterator[RemoteFront]:
    """The front that launched the engine `llm`."""
    launcher = ProcessLauncher(CONFIG, UniProc([fake_rank.__file__]), EngineAddress.of("llm"))
    executor = RemoteFront(CONFIG, launcher)
    executor.start()
    yield executor
    executor.shutdown()


@pytest.fixture
def guest(owner: RemoteFront) -> Iterator[RemoteFront]:
    executor = attach_executor(CONFIG, "llm")
    executor.start()
    assert isinstance(executor, RemoteFront)
    yield executor
    executor.shutdown()


def test_two_fronts_share_an_engine_and_each_hears_of_its_own_requests(owner: RemoteFront, guest: RemoteFront) -> None:
    callers = Caller(owner), Caller(guest)
    assert guest.limits == owner.limits
    for number, caller in enumerate(callers):
        caller.serve(*(caller.request([number, n], 5 + n) for n in range(10)))
    assert len({request_id >> 48 for caller in callers for request_id in caller.requests}) == 2


def test_a_guest_that_leaves_takes_its_requests_along_and_leaves_the_engine(
    owner: RemoteFront, guest: RemoteFront
) -> None:
    host, visitor = Caller(owner), Caller(guest)
    (endless,) = visitor.send(visitor.request(1, fake_rank.MAX_SEQ_LEN - 10, streaming=True))
    visitor.wait_for_tokens(endless)
    guest.shutdown()
    (final,) = visitor.wait(endless)
    assert final.error_code == "UNAVAILABLE"
    # A second guest with the same appetite is served by the rows that the first gave back.
    host.serve(*(host.request([n], 20) for n in range(16)))
    assert len(owner.engine_pids()) == 1


def test_a_guest_loses_ranks_that_die_and_goes_on_with_the_next_ones(owner: RemoteFront, guest: RemoteFront) -> None:
    visitor = Caller(guest)
    (long,) = visitor.send(visitor.request(1, 10_000, streaming=True))
    visitor.wait_for_tokens(long)
    prefix = guest.next_request_id() >> 48
    (rank,) = owner.engine_pids()
    os.kill(rank, signal.SIGKILL)
    until(lambda: guest.num_replays() == 1, "it is sent to the next ones")
    visitor.cancel_when_it_goes_on(long)
    result = visitor.finals[long].result
    assert result is not None and result.decoding_iter == len(visitor.tokens[long])
    # Requests that come before the next ranks are there wait for them.
    (request_id,) = visitor.send(visitor.request([2, 3], 7))
    (answer,) = visitor.wait(request_id)
    assert answer.result is not None and answer.result.finish_reason is FinishReason.LENGTH
    until(owner.is_ready, "the owner serves again")
    assert guest.next_request_id() >> 48 == prefix


def test_a_guest_knows_at_once_that_the_ranks_have_died(owner: RemoteFront) -> None:
    """Heartbeats, and looks at the address, are minutes apart."""
    died = threading.Event()
    config = EngineConfig(worker_heartbeat_timeout_ms=30 * 60_000)
    with attach_executor(config, "llm", on_engine_death=lambda reason: died.set()) as guest:
        os.kill(owner.engine_pids()[0], signal.SIGKILL)
        assert died.wait(120)
        until(guest.is_ready, "the guest has found the next ranks")


def test_ranks_that_have_died_are_not_found(owner: RemoteFront, tmp_path: Path) -> None:
    """As those of a front that was killed, whose address stays."""
    address = EngineAddress.of("llm")
    socket_path = address.resolve()
    assert socket_path is not None
    notes, kept = socket_path.parent, tmp_path / "kept"
    shutil.copytree(notes, kept, ignore=shutil.ignore_patterns("*.sock"))
    owner.shutdown()
    kept.rename(notes)
    address.point_to(socket_path)
    assert AttachedLauncher(address).open() is None


def test_an_engine_that_never_comes_is_told_by_its_name(run_directory: Path) -> None:
    executor = attach_executor(EngineConfig(worker_start_timeout_ms=300), "nobody")
    with pytest.raises(ConfigurationError, match="no engine called 'nobody' serves here"):
        executor.start()


def test_the_address_goes_with_the_engine(owner: RemoteFront, run_directory: Path) -> None:
    address = EngineAddress.of("llm")
    assert address.resolve() is not None
    owner.shutdown()
    assert address.resolve() is None
    assert list((run_directory / ENGINES).iterdir()) == []


def test_a_guest_hears_of_the_kv_cache_what_the_front_that_launched_it_does_not_keep(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside tritonserver, in whose stub nobody could fetch it."""
    config = EngineConfig(max_batch_size=8, max_num_tokens=64, tokens_per_block=4, event_buffer_max_size=100)
    launcher = ProcessLauncher(config, UniProc([fake_rank.__file__]), EngineAddress.of("llm"))
    with RemoteFront(config, launcher, keeps_statistics=False) as owner:
        monkeypatch.delenv(RUN_DIRECTORY)
        with attach_executor(config, "llm", run_directory=run_directory) as guest:
            created, *_ = guest.get_kv_cache_events(120)
            assert isinstance(created.data, KVCacheCreatedData)
            host = Caller(owner)
            host.serve(host.request(list(range(10)), 12))
            stored, *_ = guest.get_kv_cache_events(120)
            assert isinstance(stored.data, KVCacheStoredData)
            assert stored.data.blocks[0].tokens == [0, 1, 2, 3]
            assert guest.get_latest_iteration_stats(120)
        assert not owner.get_kv_cache_events() and not owner.get_latest_iteration_stats()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
def test_a_name_that_is_no_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be called"):
        EngineAddress.of(name)


def test_a_directory_that_others_may_enter_is_refused(run_directory: Path) -> None:
    (run_directory / ENGINES).mkdir()
    (run_directory / ENGINES).chmod(0o755)
    with pytest.raises(ConfigurationError, match="must belong to this user alone"):
        EngineAddress.of("llm")


def test_a_folder_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, run_directory: Path) -> None:
    (run_directory / ENGINES).touch()
    with pytest.raises(ConfigurationError, match="must belong to this user alone"):
        EngineAddress.of("llm")
    monkeypatch.delenv(RUN_DIRECTORY)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_directory / "none"))
    with pytest.raises(ConfigurationError, match="there is no folder"):
        EngineAddress.of("llm")


def test_a_guest_finds_the_configuration_of_the_engine(owner: RemoteFront) -> None:
    found = find_engine_config("llm", 0.0)
    assert (found.max_batch_size, found.max_num_tokens) == (CONFIG.max_batch_size, CONFIG.max_num_tokens)
    with pytest.raises(ConfigurationError, match="no engine called 'other' serves here"):
        find_engine_config("other", 0.0)


def test_without_a_server_the_folders_of_addresses_are_made_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(RUN_DIRECTORY)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    link = EngineAddress.of("llm").link
    assert [folder.stat().st_mode & 0o777 for folder in (link.parent, link.parent.parent)] == [0o700, 0o700]
    assert EngineAddress.of("llm").link == link, "found again"
