"""The leader rank's side of one compiled grammar: the socket of its process, the limits of its time, its end."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from enum import Enum

import msgspec

from inflight.guided_decoding import GuidedDecodingParams
from inflight.runtime.guided.messages import (
    MAX_PACKET,
    MAX_TOKENS_PER_PACKET,
    Advance,
    Close,
    Compiled,
    FromGrammar,
    Mask,
    Refused,
    Started,
    ToGrammar,
    decode_from_grammar,
    encode,
)

COMPILE_SECONDS = 2.0
"""CPU time to compile and try a grammar."""
MASK_SECONDS = 0.25
"""CPU time to find one mask, while the step of all rows waits. What masks took beyond MASK_ALLOWANCE counts until later
ones have taken that much less."""
MASK_ALLOWANCE = 0.01
"""CPU time that masks may take on average."""
PATIENCE_SECONDS = 10.0
"""Wall-clock time after which either counts as never ending, on a machine that gives the process no CPU."""
START_SECONDS = 60.0
"""Time for a process to exist: the first one waits for the import of the library."""
TICK_MS = 20
"""How often the CPU time of a process is read while it is waited for."""

TOO_LONG_TO_COMPILE = f"the grammar takes more than {COMPILE_SECONDS:g} s to compile"
TOO_LONG_TO_FOLLOW = f"the grammar is too ambiguous to be followed: a token took more than {MASK_SECONDS:g} s"
CRASHED = "the grammar could not be used: the process of its grammar ended"
NEVER_STARTED = "guided decoding is not possible: its process does not start"
NO_DRAFTS: list[int] = []
"""Never written to."""


class GrammarState(Enum):
    """COMPILING -> READY -> BROKEN; COMPILING -> BROKEN. A broken grammar has no process; its `reason` says why."""

    COMPILING = "compiling"
    READY = "ready"
    BROKEN = "broken"


class Matcher:
    """One output that follows the grammar. Its masks come in the order in which they were asked for."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_missing = 0
        """Masks that were asked for and have not come."""
        self.masks: list[Mask] = []
        """Those that have come for the next step that samples."""
        self.steps: deque[list[int]] = deque()
        """The drafts of each step that was begun and has not brought its tokens."""


class Grammar:
    """Nothing here waits for the process except `wait`. What is said to several matchers travels together."""

    def __init__(self, params: GuidedDecodingParams, connection: socket.socket) -> None:
        """`connection`: to its process, which may not exist yet."""
        connection.setblocking(False)
        self.params = params
        self.state = GrammarState.COMPILING
        self.reason = ""
        self.num_bytes = 0
        self.num_leases = 0
        """Requests in flight that use it."""
        self._socket = connection
        self._unsaid: list[ToGrammar] = []
        self._num_unsaid_tokens = 0
        self._unsent: deque[bytes] = deque()
        self._matchers: dict[int, Matcher] = {}
        self._num_made = 0
        self._num_missing = 0  # of all matchers
        self._pidfd = -1
        self._clock = 0  # of the process's CPU time
        self._since = time.monotonic()  # it was asked for what is waited for
        self._cpu_since = 0.0
        self._debt = 0.0

    # -- matchers ------------------------------------------------------------------------------------------------------

    def make_matcher(self, token_ids: list[int], end_ids: list[int]) -> Matcher:
        """A matcher of an output that begins with `token_ids`; its first mask is asked for."""
        self._num_made += 1
        matcher = Matcher(self._num_made)
        self._matchers[matcher.number] = matcher
        first, rest = token_ids[:MAX_TOKENS_PER_PACKET], token_ids[MAX_TOKENS_PER_PACKET:]
        self._ask(matcher, Advance(matcher.number, first, end_ids, wants_mask=not rest))
        while rest:
            first, rest = rest[:MAX_TOKENS_PER_PACKET], rest[MAX_TOKENS_PER_PACKET:]
            self._ask(matcher, Advance(matcher.number, first, wants_mask=not rest))
        self.send()
        return matcher

    def begin_step(self, matcher: Matcher, drafts: list[int]) -> None:
        """A step was begun that verifies `drafts`. The masks behind them are asked for as soon as all tokens before
        them are known, once `send` is called."""
        if matcher.number in self._matchers:
            if drafts and not matcher.steps:
                self._ask(matcher, Advance(matcher.number, [], wants_mask=False, drafts=drafts))
            matcher.steps.append(drafts)

    def advance(self, matcher: Matcher, token_ids: list[int]) -> None:
        """The tokens that the oldest step has brought; the masks of the step after it are asked for, once `send` is
        called."""
        if matcher.number in self._matchers:
            if matcher.steps:
                matcher.steps.popleft()
            matcher.masks.clear()
            drafts = matcher.steps[0] if matcher.steps else NO_DRAFTS
            self._ask(matcher, Advance(matcher.number, token_ids, drafts=drafts))

    def close_matcher(self, matcher: Matcher) -> None:
        """Forget a matcher; later tokens of it are ignored. May be called again."""
        if self._matchers.pop(matcher.number, None) is not None:
            self._num_missing -= matcher.num_missing
            self._say(Close(matcher.number), 0)
            self.send()

    def close_matchers(self) -> None:
        """Forget all matchers: no request uses the grammar any more."""
        for matcher in list(self._matchers.values()):
            self.close_matcher(matcher)

    @property
    def num_matchers(self) -> int:
        return len(self._matchers)

    def wait(self, matcher: Matcher, count: int = 1) -> list[Mask]:
        """The newest `count` masks of a matcher, once they have come: of the next token, then of those behind drafts.
        All with an error if the process took too long or ended; all empty if the matcher was closed while its step was
        outstanding: nobody takes the tokens of that."""
        if matcher.number not in self._matchers and self.state is not GrammarState.BROKEN:
            return [Mask(matcher.number, b"")] * count
        while matcher.num_missing and self.state is not GrammarState.BROKEN:
            self.send()
            if self._socket.fileno() < 0:
                continue  # sending has found that the process has ended
            poll = select.poll()
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.poll(TICK_MS)
            self.read()
            if matcher.num_missing:
                self._check_time(MASK_SECONDS - self._debt, TOO_LONG_TO_FOLLOW)
        if self.state is GrammarState.BROKEN:
            return [Mask(matcher.number, b"", self.reason)] * count
        return matcher.masks[-count:]

    def _ask(self, matcher: Matcher, message: Advance) -> None:
        """Keep a message for `send`, and expect the masks that it asks for."""
        self._say(message, len(message.token_ids) + len(message.drafts))
        if not self._num_missing:
            self._start_clock()
        self._num_missing += message.num_masks
        matcher.num_missing += message.num_masks

    # -- the process ---------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """While it compiles: see whether it has come to an end, or to the end of its time."""
        self.read()
        if self.state is GrammarState.COMPILING:
            if self._pidfd >= 0:
                self._check_time(COMPILE_SECONDS, TOO_LONG_TO_COMPILE)
            elif time.monotonic() - self._since > START_SECONDS:
                self.fail(NEVER_STARTED)

    def read(self) -> None:
        """Take in all that has arrived."""
        while self.state is not GrammarState.BROKEN:
            try:
                packet = self._socket.recv(MAX_PACKET)
                message = decode_from_grammar(packet) if packet else Refused(CRASHED)
            except BlockingIOError:
                return
            except (OSError, msgspec.DecodeError):
                message = Refused(CRASHED)
            self._handle(message)

    def _handle(self, message: FromGrammar) -> None:
        if isinstance(message, Started):
            self._follow(message.pid)
        elif isinstance(message, Compiled):
            self.state, self.num_bytes = GrammarState.READY, message.num_bytes
        elif isinstance(message, Refused):
            self.fail(message.reason)
        else:
            for mask in message:
                matcher = self._matchers.get(mask.matcher)
                if matcher is not None:
                    matcher.num_missing -= 1
                    self._num_missing -= 1
                    matcher.masks.append(mask)
            taken = self._cpu_seconds() - self._cpu_since
            self._debt = max(self._debt + taken - MASK_ALLOWANCE * len(message), 0.0)
            self._start_clock()  # the process goes on with the next masks
            if self._debt > MASK_SECONDS:
                self.fail(TOO_LONG_TO_FOLLOW)

    def _follow(self, pid: int) -> None:
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.fail(CRASHED)
            return
        self._clock = ~pid << 3 | 2  # the kernel's number of the clock of another process
        self._start_clock()

    def _start_clock(self) -> None:
        self._since, self._cpu_since = time.monotonic(), self._cpu_seconds()

    def _cpu_seconds(self) -> float:
        try:
            return time.clock_gettime(self._clock) if self._pidfd >= 0 else 0.0
        except OSError:
            return 0.0  # it has ended, which its socket tells

    def _check_time(self, seconds: float, reason: str) -> None:
        is_late = time.monotonic() - self._since > PATIENCE_SECONDS
        if is_late or self._cpu_seconds() - self._cpu_since > seconds:
            self.fail(reason)

    def _say(self, message: ToGrammar, num_tokens: int) -> None:
        """Keep a message for `send`."""
        if self._num_unsaid_tokens + num_tokens + 1 > MAX_TOKENS_PER_PACKET:
            self._pack()
        self._unsaid.append(message)
        self._num_unsaid_tokens += num_tokens + 1

    def _pack(self) -> None:
        if self._unsaid:
            self._unsent.append(encode(self._unsaid))
            self._unsaid, self._num_unsaid_tokens = [], 0

    def send(self) -> None:
        """Send what was said to matchers, as far as the process takes it in."""
        self._pack()
        while self._unsent and self.state is not GrammarState.BROKEN:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self.fail(CRASHED)
                return
            self._unsent.popleft()

    def fail(self, reason: str) -> None:
        """It cannot be used: `reason` is what its requests are told."""
        self.state, self.reason = GrammarState.BROKEN, reason
        self.close()

    def close(self) -> None:
        """Kill the process and free all that belongs to it. May be called again."""
        if self.state is not GrammarState.BROKEN:
            self.state, self.reason = GrammarState.BROKEN, CRASHED
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = -1
        self._socket.close()
        self._matchers.clear()
        self._unsaid.clear()
        self._unsent.clear()
