"""A front of an engine in other processes: one connection for each of its replicas, which together serve one journal.

Only the launchers know how the ranks are started, and whether this front or another one starts them.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, EngineUnavailable, InvalidRequest
from inflight.executor.front.connection import Connection
from inflight.executor.front.engine_state import EngineState
from inflight.executor.front.front import SHUT_DOWN, Front
from inflight.executor.wire.launcher import Launcher
from inflight.executor.wire.messages import MAX_MESSAGE_BYTES, Cancel, CancelSequence, Hello, Submit, encode
from inflight.generation_defaults import GenerationDefaults
from inflight.request import Request


class RemoteFront(Front):
    """A front over one Launcher for each replica."""

    def __init__(
        self,
        config: EngineConfig,
        *launchers: Launcher,
        name: str = "",
        keep_trying: bool = True,
        keeps_statistics: bool = True,
        on_engine_death: Callable[[str], None] | None = None,
    ) -> None:
        """`launchers`: of the replicas, at least one; either all own their ranks or none does. `name`: the engine's, by
        which logs call it; "" = it has none. `keep_trying`: if False, relaunches end once no replica serves and
        requests wait for none any more; the next one then needs a call of relaunch(). `keeps_statistics`: see Front.
        `on_engine_death(reason)` is called for each replica that is lost, on its connection's thread, once it is known
        which requests go on elsewhere, which wait and which fail; it must not block. Raises ConfigurationError for a
        wrong generation_config.json."""
        defaults = GenerationDefaults.load(config)
        super().__init__(config, defaults, num_replicas=len(launchers), keeps_statistics=keeps_statistics)
        self.called = f"the engine {name}" if name else "the engine"
        """In logs."""
        self._config = config
        self._launchers = launchers
        self._owns_ranks = launchers[0].owns_ranks
        self._has_begun = False
        self._start_errors: dict[int, str] = {}
        """By replica: why it has not been found, or has not been started."""
        self._connections = [
            Connection(self, launcher, config, index, keep_trying=keep_trying, on_death=on_engine_death)
            for index, launcher in enumerate(launchers)
        ]

    # -- the engine ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the processes of ranks, if that is what the launchers do, and return while they load: what `start`
        would do, or `shutdown` after an error, need not wait for what else there is to do. Call `start` then: as a
        context manager a front does not tell of ranks that have failed meanwhile."""
        if all(launcher.starts_processes for launcher in self._launchers):
            self._begin()
            for connection in self._connections:
                connection.wait_until_open()

    def _begin(self) -> None:
        self._has_begun = True
        atexit.register(self.shutdown)
        for connection in self._connections:
            connection.start()

    def start(self) -> None:
        """An engine of one's own serves once all its replicas do, somebody else's once one does."""
        if not self._has_begun:
            self._begin()
        with self._changed:
            self._changed.wait_for(self._has_started)
            error = self._start_error()
        if error:
            self.shutdown()
            raise ConfigurationError(error)

    def _has_started(self) -> bool:
        """Whether it has begun to serve, or has failed to."""
        if self._owns_ranks and self._start_errors:
            return True
        states = self._replicas.states()
        return EngineState.STARTING not in states or (not self._owns_ranks and EngineState.READY in states)

    def _start_error(self) -> str:
        if self._state is EngineState.CLOSED:
            return SHUT_DOWN
        counts = self._owns_ranks or self._state is not EngineState.READY
        return next(iter(self._start_errors.values()), "") if counts else ""

    def shutdown(self) -> None:
        for connection in self._connections:
            connection.close()
        for connection in self._connections:
            connection.join()
        self._replica_lost(EngineState.CLOSED, SHUT_DOWN)
        atexit.unregister(self.shutdown)

    def relaunch(self) -> None:
        """Relaunch lost ranks now, without waiting for the backoff. Does nothing unless ranks are lost."""
        for connection in self._connections:
            connection.relaunch()

    def num_spares(self) -> int:
        return sum(connection.num_spares for connection in self._connections)

    def replace_ranks(self, replica: int) -> None:
        """Launch the ranks of a replica anew, while it serves: for another checkpoint in the same folder, for example.
        Its requests go on at the other replicas at once, or, if it is the only one, with the new ranks; only what is
        longer than `journal_max_tokens` ends. Returns before the new ranks serve: see `ready_replicas`. Does nothing
        while it does not serve. Raises EngineUnavailable if another front has launched the ranks."""
        if not self._owns_ranks:
            raise EngineUnavailable("only the front that has launched an engine's ranks can replace them")
        self._connections[replica].replace_ranks()

    def engine_pids(self) -> list[int]:
        """Ids of the running processes of the engine on this machine that this front started, without spares."""
        return [pid for connection in self._connections for pid in connection.pids()]

    # -- Front ---------------------------------------------------------------------------------------------------------

    def _encode(self, request: Request) -> object:
        frame = encode(Submit([request]))
        if len(frame) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"the request is larger than {MAX_MESSAGE_BYTES} bytes")
        return frame

    def _send_request(self, replica: int, request_id: int, encoded: object) -> None:
        assert isinstance(encoded, bytes)
        self._connections[replica].send(request_id, encoded)

    def _send_cancel(self, replica: int, request_id: int) -> None:
        self._connections[replica].send(request_id, encode(Cancel([request_id])))

    def _send_cancel_sequence(self, replica: int, request_id: int, sequence_index: int) -> None:
        self._connections[replica].send(request_id, encode(CancelSequence(request_id, sequence_index)))

    def _drop_unsent(self, replica: int) -> None:
        self._connections[replica].drop_unsent()

    # -- for connections -----------------------------------------------------------------------------------------------

    @property
    def front_id(self) -> int:
        return self._ids.front_id

    def hello(self) -> Hello:
        """How this front introduces itself to a leader."""
        return Hello(
            front_id=self.front_id,
            pid=os.getpid(),
            wants_iteration_stats=self._statistics.wants_iterations,
            wants_request_stats=self._statistics.wants_requests,
            wants_kv_cache_events=self._statistics.wants_events,
        )

    def redraw_id(self, occupied: int) -> None:
        """Another front of a replica has that id. All replicas are told the next one before any request that has it."""
        with self._lock:
            if self.front_id == occupied:
                self._ids.redraw_front()
        for connection in self._connections:
            connection.wake()

    def is_in_flight(self, request_id: int) -> bool:
        return request_id in self._journal

    def fail_start(self, reason: str, replica: int) -> None:
        """A replica that has never served cannot be reached."""
        self._start_errors[replica] = reason
        self._replica_lost(EngineState.DOWN, reason, replica)
