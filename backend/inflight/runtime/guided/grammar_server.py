"""The process from which the processes of grammars are forked, and the life of such a process.

    python -m inflight.runtime.guided.grammar_server FD TOKENIZER_FOLDER VOCAB_SIZE

started by `Grammars`. It imports XGrammar and reads the tokenizer once, which takes seconds; a fork then takes
milliseconds. It computes nothing itself, so nothing that a client sends can stop it. It has one thread, because a fork
copies no others. Whatever is forked ends with it, and it ends with the rank.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import xgrammar

from inflight.guided_decoding import GuidedDecodingParams
from inflight.runtime.guided.compiling import TOO_LARGE, GrammarRefused, compile_grammar
from inflight.runtime.guided.matchers import Matchers
from inflight.runtime.guided.messages import (
    MAX_PACKET,
    Close,
    Compiled,
    Mask,
    Refused,
    Started,
    ToGrammar,
    decode_compile,
    decode_to_grammar,
    encode,
)
from inflight.runtime.guided.trial import beginnings, try_grammar
from inflight.runtime.guided.vocabulary import Vocabulary, load_vocabulary

MAX_MEMORY_GROWTH = 256 * 1024 * 1024
"""Bytes by which a grammar's process may grow in all."""
MAX_COMPILED_BYTES = 64 * 1024 * 1024
"""Bytes by which it may have grown when the grammar is compiled and tried."""
SOON_SECONDS = 0.005
"""CPU time after which masks are sent even if others of the same step are still to be found."""
MASK_FRAME = 512
"""Bytes of a mask's message besides its bits, at most."""

PR_SET_PDEATHSIG = 1


def main() -> None:
    _die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system takes away processes that end
    reason, vocabulary = "", None
    try:
        vocabulary = load_vocabulary(Path(sys.argv[2]), int(sys.argv[3]))
    except Exception as error:
        reason = f"guided decoding is not possible: {error}"
    while True:
        message, fds, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
        if not message:
            return
        leader = socket.socket(fileno=fds[0])
        if vocabulary is None:
            leader.send(encode(Refused(reason)))
        elif os.fork() == 0:
            control.close()
            try:
                _live(leader, decode_compile(message).params, vocabulary)
            finally:
                os._exit(0)
        leader.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _live(leader: socket.socket, params: GuidedDecodingParams, vocabulary: Vocabulary) -> None:
    """The whole life of a grammar's process."""
    _die_with_parent()
    leader.send(encode(Started(os.getpid())))
    try:
        memory = _memory("VmData")
        resource.setrlimit(resource.RLIMIT_DATA, (memory + MAX_MEMORY_GROWTH, memory + MAX_MEMORY_GROWTH))
        vocabulary = vocabulary.showing(params.shown_token_ids)
        compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
        matchers = Matchers(compile_grammar(params, compiler), vocabulary)
        for beginning in beginnings(params):
            try_grammar(matchers, vocabulary.info.stop_token_ids, beginning)
        num_bytes = max(_memory("VmData") - memory, 0)
        if num_bytes > MAX_COMPILED_BYTES:
            raise GrammarRefused(TOO_LARGE)
    except GrammarRefused as refused:
        leader.send(encode(Refused(str(refused))))
        return
    leader.send(encode(Compiled(num_bytes)))
    while packet := leader.recv(MAX_PACKET):
        for masks in _answers(matchers, decode_to_grammar(packet)):
            leader.send(encode(masks))


def _answers(matchers: Matchers, messages: list[ToGrammar]) -> Iterator[list[Mask]]:
    """The masks that `messages` ask for, together as far as a packet holds them and none waits long for another."""
    masks: list[Mask] = []
    num_bytes, since = 0, time.process_time()
    for message in messages:
        if isinstance(message, Close):
            matchers.close(message.matcher)
            continue
        for mask in matchers.advance(message):
            size = len(mask.bits) + MASK_FRAME
            if masks and num_bytes + size > MAX_PACKET:
                yield masks
                masks, num_bytes = [], 0
            masks.append(mask)
            num_bytes += size
            if time.process_time() - since > SOON_SECONDS:
                yield masks
                masks, num_bytes, since = [], 0, time.process_time()
    if masks:
        yield masks


def _memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    main()
