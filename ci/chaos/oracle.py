"""The judge: what each request gets alone, whether a stream got the same, and whether the server counts as its clients
do."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from server_metrics import ACCEPTED, OUTCOMES, REQUESTS

from ci.chaos.answer import Answer
from ci.chaos.faults.fault import Fault
from ci.chaos.load import Load, Stream
from ci.chaos.scene import ChaosFailed, Scene, stub_of
from ci.chaos.workload import Item

REST_DEADLINE = 180.0
OUTAGES = (
    "[UNAVAILABLE]",
    # tritonserver's own words while a model is loaded again, and of a stub that hangs.
    "is not healthy",
    "no available versions",
    "is not ready",
    "unknown model",
    # gRPC's of a connection that ended in the middle of a response.
    "Internal error from Core",
)
"""What an error may say where a front's end is allowed to end its streams."""
REFUSALS = ("[INVALID_ARGUMENT]", "[NOT_FOUND]")
"""Codes of what a network does not serve."""
NOT_ACCEPTED, CONNECTING = "before receiving SETTINGS frame", 20.0
"""What gRPC says of a connection that a server without descriptors did not accept, and the seconds that it waits. The
streams of a process share the attempt, which may have begun before they were sent."""


class Verdict(Enum):
    EQUAL = "equal"
    ENDED = "ended"
    """With an error, in a fault that is allowed to end it; what came before it is right."""
    REFUSED = "refused"
    """The same, of a request that was sent when the fault had already begun."""
    DIFFERENT = "different"
    LOST = "lost"
    """It ended with an error, or not at all, although it was promised to go on."""


@dataclass(eq=False)
class Injection:
    """One fault, from its beginning until every stream goes on."""

    fault: Fault
    began: float = field(default_factory=time.monotonic)
    serves: float | None = None
    """When the server served as before."""
    over: float | None = None
    """When every stream had gone on or ended as well."""
    what: str = ""
    """What exactly was done."""
    in_flight: list[Stream] = field(default_factory=list)
    """Streams that were open when it began."""

    def allows_error(self, stream: Stream) -> bool:
        fault, front = self.fault, stream.item.front
        return front in fault.ends or (front in fault.refuses and stream.sent >= self.began and not stream.arrivals)

    def stalled(self) -> list[Stream]:
        """Streams that have had no response yet since the server serves again."""
        assert self.serves is not None
        return [each for each in self.in_flight if each.ended is None and each.latest < self.serves]

    def touches(self, stream: Stream) -> bool:
        since = stream.sent - CONNECTING if NOT_ACCEPTED in stream.answer.error else stream.sent
        return (self.over is None or since <= self.over) and (stream.ended is None or stream.ended >= self.began)


@dataclass(frozen=True)
class Account:
    """What a stub of `llm` has counted, and the equal answers that its clients have got."""

    stub: int
    completed: float
    failed: float
    got: int


class Oracle:
    def __init__(self, scene: Scene, *, exact: bool) -> None:
        """`exact`: a token that is computed again has the very same bits, so that other numbers are equal too."""
        self._scene, self._exact = scene, exact
        self._account: Account | None = None
        self.alone: dict[str, Answer] = {}
        """By the items' names."""
        self.injections: list[Injection] = []
        self.verdicts: dict[Stream, Verdict] = {}
        self.complaints: list[str] = []
        """What was promised and did not come true, in words."""

    async def learn(self, load: Load, items: list[Item], *, may_refuse: bool) -> list[Item]:
        """Ask everything once, one after the other, with nobody else there. Returns what was answered.

        `may_refuse`: whether a request may be for another network than this one."""
        for item in items:
            stream = await load.ask(item)
            error = stream.answer.error
            if may_refuse and any(code in error for code in REFUSALS):
                print(f"  left out: {item.name}: {error}", flush=True)
            elif error:
                raise ChaosFailed(f"{item.name} fails even alone: {error}")
            else:
                self.alone[item.name] = stream.answer
        return [item for item in items if item.name in self.alone]

    def judge(self, stream: Stream) -> None:
        verdict, why = self._verdict(stream)
        self.verdicts[stream] = verdict
        if verdict in (Verdict.DIFFERENT, Verdict.LOST):
            faults = ", ".join(each.fault.name for each in self._touching(stream)) or "no fault"
            self.complain(f"{verdict.value}: {stream.item.name} ({faults}): {why}")

    def complain(self, what: str) -> None:
        self.complaints.append(what)
        print(f"  !! {what[:1000]}", flush=True)

    def _verdict(self, stream: Stream) -> tuple[Verdict, str]:
        answer, alone = stream.answer, self.alone[stream.item.name]
        if not answer.error:
            difference = answer.differs(alone, exact=self._exact)
            return (Verdict.DIFFERENT, difference) if difference else (Verdict.EQUAL, "")
        allowed = [each for each in self._touching(stream) if each.allows_error(stream)]
        if not allowed or not any(words in answer.error for words in OUTAGES):
            return Verdict.LOST, answer.error
        if not answer.begins(alone):
            return Verdict.DIFFERENT, f"before its error: {answer.texts}"
        return (Verdict.REFUSED if any(stream.sent > each.began for each in allowed) else Verdict.ENDED), ""

    def _touching(self, stream: Stream) -> list[Injection]:
        return [each for each in self.injections if each.touches(stream)]

    # At rest

    async def check_rest(self, asked: Counter[str]) -> None:
        """With nothing in flight: each request that was asked has one verdict, the engine holds nothing of any, each
        that its stub has accepted has one outcome, and since the last look the stub has completed at least what its
        clients have got."""
        if asked.total() != len(self.verdicts):
            self.complain(f"{asked.total()} streams were asked, and {len(self.verdicts)} ended")
        scene = self._scene
        stub = scene.roles()[stub_of("llm")]

        got = sum(verdict is Verdict.EQUAL and each.item.model == "llm" for each, verdict in self.verdicts.items())
        before = self._account if self._account is not None and self._account.stub == stub else None
        metrics = await scene.metrics()

        async def is_at_rest() -> bool:
            # By pid: what a stub showed stays there when another takes its place.
            nonlocal metrics
            metrics = await scene.metrics()
            free, blocks = (
                metrics.of(name, pid=str(stub)) for name in ("inflight_kv_blocks_free", "inflight_kv_blocks")
            )
            return metrics.of(REQUESTS, request_type="active", pid=str(stub)) == 0 and 0 < free == blocks

        async def is_counted() -> bool:
            # An answer is counted a moment after its client has it.
            at_rest = await is_at_rest()
            completed = metrics.of(OUTCOMES, outcome="completed", pid=str(stub))
            has_ends = metrics.of(ACCEPTED, pid=str(stub)) == metrics.of(OUTCOMES, pid=str(stub))
            return at_rest and has_ends and (before is None or completed - before.completed >= got - before.got)

        try:
            await scene.wait_until(is_at_rest, "no request is active and every KV block is free", REST_DEADLINE)
            await scene.wait_until(
                is_counted, f"all of {got} answers are counted, and an end of each accepted request", REST_DEADLINE
            )
        except ChaosFailed as error:
            self.complain(str(error))
        completed, failed = (metrics.of(OUTCOMES, outcome=each, pid=str(stub)) for each in ("completed", "failed"))
        if before is not None and failed > before.failed:
            self.complain(f"{failed - before.failed:.0f} requests failed by the engine's own fault")
        self._account = Account(stub, completed, failed, got)
