"""The requests that a front has in flight, by id and in order of acceptance, on whichever replica: what is left of them
when ranks die.

Whatever ends a request passes through here: each method returns the responses that callers are to receive, and a
request with its final one is forgotten. Knows no lock and no socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from inflight.config import EngineConfig
from inflight.errors import DuplicateRequest, InflightError
from inflight.executor.front.journal_entry import JournalEntry
from inflight.executor.front.routing import Placement
from inflight.executor.front.sent_adapters import SentAdapters
from inflight.request import Request
from inflight.result import FinishReason, Response


class Journal:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._entries: dict[int, JournalEntry] = {}
        self._handed_over: list[JournalEntry] = []
        self._adapters = SentAdapters(config.lora_cache_host_memory_bytes)
        self.num_pauses = 0
        """Times that requests in flight have begun to wait for ranks in place of lost ones."""
        self.num_replays = 0
        """Requests that were sent again to such ranks; one that was sent again twice counts twice."""
        self.num_handovers = 0
        """Requests whose context phase has ended at one replica, to go on at another."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def get(self, request_id: int) -> JournalEntry | None:
        return self._entries.get(request_id)

    def check_free(self, request_ids: list[int]) -> None:
        """Raise DuplicateRequest if an id is in flight, or occurs twice."""
        seen: set[int] = set()
        for request_id in request_ids:
            if request_id in self._entries or request_id in seen:
                raise DuplicateRequest(f"requestId {request_id} is already in progress, request is ignored.")
            seen.add(request_id)

    # -- to ranks ------------------------------------------------------------------------------------------------------

    def accept(self, request: Request) -> JournalEntry:
        """Enter a request whose id is free."""
        entry = JournalEntry(request, self._config, adapter=self._adapters.note(request))
        self._entries[request.request_id] = entry
        return entry

    def message(self, entry: JournalEntry, placement: Placement, now: float) -> Request:
        """The request as it is sent to a replica's present ranks, which happens now. `now`: time.monotonic()."""
        entry.place(placement)
        self.num_replays += entry.num_replays > 0
        with_adapter = self._adapters.must_tell(entry.request, placement.replica)
        return entry.message(now, with_adapter=with_adapter)

    def unsent(self) -> Iterator[JournalEntry]:
        """What no present ranks know, in order of acceptance."""
        return iter([entry for entry in self._entries.values() if entry.placement is None])

    # -- from ranks ----------------------------------------------------------------------------------------------------

    def note_started(self, request_ids: Iterable[int]) -> None:
        """The ranks begin these requests."""
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.note_started()

    def note_heartbeat(self, replica: int) -> None:
        """Its ranks have lived through all steps before."""
        for entry in self._on(replica):
            entry.suspicion.note_heartbeat()

    def note(self, response: Response) -> list[Response]:
        """Of a request that is not in flight: nothing."""
        entry = self._entries.get(response.request_id)
        if entry is None:
            return []
        if entry.note_next(response):
            return [response]
        responses = self._ended(entry.note(response))
        if entry.is_handed_over:
            entry.is_handed_over = False
            self.num_handovers += 1
            self._handed_over.append(entry)
        return responses

    def take_handed_over(self) -> list[JournalEntry]:
        """Those whose context phase has ended since the last call: they are to be sent on."""
        taken, self._handed_over = self._handed_over, []
        return taken

    # -- without ranks -------------------------------------------------------------------------------------------------

    def ranks_died(self, replica: int, *, planned: bool = False) -> list[Response]:
        """All requests of that replica wait for other ranks now, but for those that end."""
        self._adapters.ranks_died(replica)
        return self._ended([last for entry in self._on(replica) for last in entry.ranks_died(planned=planned)])

    def note_pause(self) -> None:
        """What no other ranks could take over after such a death waits from now on."""
        self.num_pauses += any(entry.placement is None for entry in self._entries.values())

    def release(self, replica: int) -> None:
        """Its ranks could not be brought back: what waits for them alone may go on elsewhere."""
        for entry in self._entries.values():
            if entry.suspicion.only_replica == replica:
                entry.suspicion.release()

    def fail_all(self, error: InflightError) -> list[Response]:
        """End all requests, because there will be no ranks for which they could wait."""
        self._adapters.all_ranks_died()
        return self._ended([entry.fail(error) for entry in self._entries.values()])

    def fail(self, entry: JournalEntry, error: InflightError) -> list[Response]:
        return self._ended([entry.fail(error)])

    def end(self, entry: JournalEntry, reason: FinishReason) -> list[Response]:
        """It ends while it waits for ranks."""
        return self._ended(entry.end(reason))

    def end_sequence(self, entry: JournalEntry, index: int) -> list[Response]:
        """The same of one sequence, which is cancelled."""
        return self._ended(entry.end_sequence(index))

    def end_overdue(self, now: float) -> list[Response]:
        """Those whose allotted time passes while they wait for ranks, which would watch it."""
        overdue = [entry for entry in self.unsent() if entry.is_overdue(now)]
        return [response for entry in overdue for response in self.end(entry, FinishReason.TIMED_OUT)]

    def _on(self, replica: int) -> list[JournalEntry]:
        return [entry for entry in self._entries.values() if entry.placement and entry.placement.replica == replica]

    def _ended(self, responses: list[Response]) -> list[Response]:
        for response in responses:
            if response.is_final:
                self._entries.pop(response.request_id).place(None)
        return responses
