"""The process from which the processes of grammars are forked, and the life of such a process.

    python -m inflight.runtime.guided.grammar_server FD TOKENIZER_FOLDER VOCAB_SIZE

started by `Grammars`. It imports XGrammar and reads the tokenizer once, which takes seconds; a fork then takes
milliseconds. It computes nothing itself, so nothing that a client sends can stop it. It has one thread, because a fork
copies no others. Whatever is forked ends with it, and it ends with the rank.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xgrammar

from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.runtime.guided.matchers import TOO_LARGE, Matchers
from inflight.runtime.guided.messages import (
    MAX_PACKET,
    Advance,
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
from inflight.runtime.guided.vocabulary import Vocabulary, load_vocabulary

MAX_MEMORY_GROWTH = 256 * 1024 * 1024
"""Bytes by which a grammar's process may grow in all."""
MAX_COMPILED_BYTES = 64 * 1024 * 1024
"""Bytes by which it may have grown when the grammar is compiled and tried."""
TRIAL_TOKENS = 256
TRIAL_SECONDS = 1.0
"""CPU time of the whole trial walk above which a grammar is refused."""
MAX_TRIAL_STEP_SECONDS = 0.05
"""CPU time of one token of the trial walk above which a grammar is refused."""
SOON_SECONDS = 0.005
"""CPU time after which masks are sent even if others of the same step are still to be found."""
MASK_FRAME = 512
"""Bytes of a mask's message besides its bits, at most."""
MAX_WHITESPACE = 8
"""Characters of whitespace in a row between the parts of a JSON text; without a limit, weak models write no others."""
ANY_OBJECT = '{"type": "object"}'
TOO_SLOW = "the grammar is too ambiguous to be followed: finding its next tokens takes too long"

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
        matchers = Matchers(_compile(params, vocabulary.info), vocabulary)
        _try(matchers, vocabulary.info.stop_token_ids)
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


class GrammarRefused(Exception):
    """With the sentence for the client."""


def _compile(params: GuidedDecodingParams, info: xgrammar.TokenizerInfo) -> xgrammar.CompiledGrammar:
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    try:
        if params.guide_type is GuideType.JSON:
            return compiler.compile_json_schema(ANY_OBJECT, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
        if params.guide_type is GuideType.JSON_SCHEMA:
            return compiler.compile_json_schema(params.guide, max_whitespace_cnt=MAX_WHITESPACE)
        if params.guide_type is GuideType.REGEX:
            return compiler.compile_regex(params.guide)
        if params.guide_type is GuideType.EBNF_GRAMMAR:
            return compiler.compile_grammar(params.guide)
        return compiler.compile_structural_tag(params.guide)
    except MemoryError:
        raise GrammarRefused(TOO_LARGE) from None
    except Exception as error:
        if "bad_alloc" in str(error):
            raise GrammarRefused(TOO_LARGE) from None
        raise GrammarRefused(f"the guide of type {params.guide_type.value} cannot be compiled") from None


def _try(matchers: Matchers, end_ids: list[int]) -> None:
    """Follow the grammar along random tokens, always the same, and refuse it if a token takes long.

    How long a token takes grows with the number of readings that the grammar has for the output so far.
    """
    choose = random.Random(0)
    token_ids: list[int] = []
    started = time.process_time()
    for _ in range(TRIAL_TOKENS):
        before = time.process_time()
        (mask,) = matchers.advance(Advance(-1, token_ids, end_ids))
        now = time.process_time()
        if now - before > MAX_TRIAL_STEP_SECONDS or now - started > TRIAL_SECONDS:
            raise GrammarRefused(TOO_SLOW)
        if mask.error == TOO_LARGE or (mask.error and not token_ids):
            raise GrammarRefused(mask.error)
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask.bits, dtype=np.uint8), bitorder="little"))
        allowed = np.setdiff1d(allowed, end_ids)
        if not len(allowed):
            break
        token_ids = [int(allowed[choose.randrange(len(allowed))])]
    matchers.close(-1)


def _memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    main()
