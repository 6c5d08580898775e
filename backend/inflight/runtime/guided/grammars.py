"""The compiled grammars of an engine, on its leader rank: at most one for equal parameters, kept in a bounded cache.

A request leases its grammar while it is in flight. Grammars without a lease are kept for later requests until there is
no room for another one: the one used least recently goes first. Used on the worker loop's thread alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

from inflight.guided_decoding import GuidedDecodingParams
from inflight.runtime.guided.grammar import CRASHED, Grammar, GrammarState
from inflight.runtime.guided.messages import Compile, encode

MAX_COMPILING = 2
"""Grammars that are compiled at the same time; others wait for their turn."""
MAX_IDLE = 32
"""Grammars beyond the number of running sequences that exist at the same time."""
MAX_BYTES = 512 * 1024 * 1024
"""Memory of all grammars together above which no further one is compiled."""


class Grammars:
    """Unless it is prepared, no process exists before the first request with a grammar."""

    def __init__(
        self, tokenizer_folder: str | Path, vocab_size: int, max_batch_size: int, *, is_prepared: bool = False
    ) -> None:
        """`is_prepared`: start the process at once that grammars are forked from; until it can fork takes seconds."""
        self._tokenizer_folder = str(tokenizer_folder)
        self._vocab_size = vocab_size
        self._max_grammars = max_batch_size + MAX_IDLE
        self._grammars: OrderedDict[GuidedDecodingParams, Grammar] = OrderedDict()  # least recently used first
        self._waiting: OrderedDict[GuidedDecodingParams, int] = OrderedDict()  # -> leases; not begun yet
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        if is_prepared:
            self._start_server()

    def lease(self, params: GuidedDecodingParams) -> None:
        """A request needs this grammar from now on. To be followed by exactly one `release`."""
        grammar = self._grammars.get(params)
        if grammar is not None and not grammar.num_leases:
            grammar.read()
            if grammar.state is GrammarState.BROKEN:  # its process ended while nobody used it
                self._drop(grammar)
                grammar = None
        if grammar is None:
            self._waiting[params] = self._waiting.get(params, 0) + 1
        else:
            grammar.num_leases += 1
            self._grammars.move_to_end(params)

    def release(self, params: GuidedDecodingParams) -> None:
        """A request that had leased it has ended."""
        if params in self._waiting:
            self._waiting[params] -= 1
            if not self._waiting[params]:
                del self._waiting[params]
            return
        grammar = self._grammars[params]
        grammar.num_leases -= 1
        if grammar.num_leases:
            return
        if grammar.state is GrammarState.READY:
            grammar.close_matchers()
        else:
            # A broken one is tried again, should it come again; one that nobody waits for need not be compiled.
            self._drop(grammar)

    def find(self, params: GuidedDecodingParams) -> Grammar | None:
        """The grammar, if its compiling has begun."""
        return self._grammars.get(params)

    def poll(self) -> bool:
        """Begin what may begin, and see to what is being compiled. True if some grammar is waited for."""
        compiling = [each for each in self._grammars.values() if each.state is GrammarState.COMPILING]
        for grammar in compiling:
            grammar.poll()
        num_compiling = sum(each.state is GrammarState.COMPILING for each in compiling)
        while self._waiting and num_compiling < MAX_COMPILING and self._make_room():
            params, num_leases = self._waiting.popitem(last=False)
            self._begin(params, num_leases)
            num_compiling += 1
        return bool(self._waiting) or num_compiling > 0

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._grammars.values())

    def __len__(self) -> int:
        return len(self._grammars)

    def close(self) -> None:
        """End all processes."""
        for grammar in list(self._grammars.values()):
            self._drop(grammar)
        self._waiting.clear()
        self._end_server()

    def _make_room(self) -> bool:
        """Drop grammars without a lease until there is room for one more."""
        while len(self._grammars) >= self._max_grammars or self.num_bytes > MAX_BYTES:
            idle = next((each for each in self._grammars.values() if not each.num_leases), None)
            if idle is None:
                return False
            self._drop(idle)
        return True

    def _drop(self, grammar: Grammar) -> None:
        grammar.close()
        del self._grammars[grammar.params]

    def _begin(self, params: GuidedDecodingParams, num_leases: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        grammar = Grammar(params, ours)
        grammar.num_leases = num_leases
        self._grammars[params] = grammar
        with theirs:
            for _ in range(2):  # a server that has ended is started again, once
                if self._control is None:
                    self._start_server()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [encode(Compile(params))], [theirs.fileno()])
                    return
                except OSError:
                    self._end_server()
        grammar.fail(CRASHED)

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = "inflight.runtime.guided.grammar_server"
        command = [sys.executable, "-m", module, str(theirs.fileno()), self._tokenizer_folder, str(self._vocab_size)]
        # One thread each: a fork copies only the thread that forks.
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with theirs:
            # The library's warnings quote the grammar, which is a client's text: nothing of them is logged.
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **single, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._control = ours

    def _end_server(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
