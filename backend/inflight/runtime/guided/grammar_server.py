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
from inflight.runtime.guided.vocabulary import load_tokenizer_info

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
MASK_FRAME = 256
"""Bytes of a mask's message besides its bits, at most."""
MAX_WHITESPACE = 8
"""Characters of whitespace in a row between the parts of a JSON text; without a limit, weak models write no others."""
ANY_OBJECT = '{"type": "object"}'
TOO_SLOW = "the grammar is too ambiguous to be followed: finding its next tokens takes too long"
TOO_LARGE = "the grammar needs too much memory"
DEAD_END = "no token of the vocabulary continues the output within the grammar"

PR_SET_PDEATHSIG = 1


def main() -> None:
    _die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system takes away processes that end
    reason, info = "", None
    try:
        info = load_tokenizer_info(Path(sys.argv[2]), int(sys.argv[3]))
    except Exception as error:
        reason = f"guided decoding is not possible: {error}"
    while True:
        message, fds, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
        if not message:
            return
        leader = socket.socket(fileno=fds[0])
        if info is None:
            leader.send(encode(Refused(reason)))
        elif os.fork() == 0:
            control.close()
            try:
                _live(leader, decode_compile(message).params, info)
            finally:
                os._exit(0)
        leader.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _live(leader: socket.socket, params: GuidedDecodingParams, info: xgrammar.TokenizerInfo) -> None:
    """The whole life of a grammar's process."""
    _die_with_parent()
    leader.send(encode(Started(os.getpid())))
    try:
        memory = _memory("VmData")
        resource.setrlimit(resource.RLIMIT_DATA, (memory + MAX_MEMORY_GROWTH, memory + MAX_MEMORY_GROWTH))
        grammar = _compile(params, info)
        matchers = Matchers(grammar, info.vocab_size)
        _try(matchers, info.stop_token_ids)
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
        try:
            mask = matchers.advance(message)
        except (MemoryError, RuntimeError):
            mask = Mask(message.matcher, b"", TOO_LARGE)
        if mask is None:
            continue
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


class Matchers:
    """The matchers of one compiled grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._grammar = grammar
        self._matchers: dict[int, tuple[xgrammar.GrammarMatcher, list[int]]] = {}
        self._words = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)

    def advance(self, message: Advance) -> Mask | None:
        """Take tokens in and, if asked, return the mask of the next one."""
        if message.matcher not in self._matchers:
            end_ids = message.end_ids or []
            made = xgrammar.GrammarMatcher(self._grammar, override_stop_tokens=end_ids or None)
            self._matchers[message.matcher] = made, end_ids
        matcher, end_ids = self._matchers[message.matcher]
        for token_id in message.token_ids:
            if not matcher.is_terminated() and not matcher.accept_token(token_id):
                return Mask(message.matcher, b"", "the output so far does not follow the grammar")
        if not message.wants_mask:
            return None
        return self._mask(message.matcher, matcher, end_ids)

    def close(self, matcher: int) -> None:
        self._matchers.pop(matcher, None)

    def _mask(self, name: int, matcher: xgrammar.GrammarMatcher, end_ids: list[int]) -> Mask:
        words = self._words
        may_end = matcher.is_terminated()
        if may_end:
            words.fill(0)  # only end tokens follow an end token, where min_tokens asks for more
        else:
            matcher.fill_next_token_bitmask(words, 0)
            may_end = matcher.is_completed()
        bits = words.view(np.uint32)[0]
        for end_id in end_ids:
            bit = np.uint32(1 << end_id % 32)
            bits[end_id // 32] = bits[end_id // 32] | bit if may_end else bits[end_id // 32] & ~bit
        if not bits.any():
            return Mask(name, b"", DEAD_END)
        return Mask(name, bits.tobytes())


def _try(matchers: Matchers, end_ids: list[int]) -> None:
    """Follow the grammar along random tokens, always the same, and refuse it if a token takes long.

    How long a token takes grows with the number of readings that the grammar has for the output so far.
    """
    choose = random.Random(0)
    token_ids: list[int] = []
    started = time.process_time()
    for _ in range(TRIAL_TOKENS):
        before = time.process_time()
        try:
            mask = matchers.advance(Advance(-1, token_ids, end_ids))
        except (MemoryError, RuntimeError):
            raise GrammarRefused(TOO_LARGE) from None
        now = time.process_time()
        if now - before > MAX_TRIAL_STEP_SECONDS or now - started > TRIAL_SECONDS:
            raise GrammarRefused(TOO_SLOW)
        assert mask is not None
        if mask.error and not token_ids:
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
