"""The compiled grammars of an engine, on its leader rank: at most one for equal parameters, kept in a bounded cache.

A request leases its grammar while it is in flight. Grammars without a lease are kept for later requests until there is
no room for another one: the one used least recently goes first. Used on the worker loop's thread alone; a thread of
its own compiles.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from pathlib import Path

from inflight.guided_decoding import GuidedDecodingParams
from inflight.runtime.guided.forced_text import ForcedText
from inflight.runtime.guided.library import Compiled, GrammarLibrary, GrammarRefused
from inflight.runtime.guided.mask_thread import MaskThread
from inflight.runtime.guided.outputs import Output, Work
from inflight.runtime.guided.vocabulary import Vocabulary, load_vocabulary

logger = logging.getLogger(__name__)

MAX_IDLE = 32
"""Grammars beyond the number of running sequences that exist at the same time."""
CRASHED = "the grammar could not be used: compiling it failed"

MakeLibrary = Callable[[Vocabulary], GrammarLibrary]


class GrammarState(Enum):
    """COMPILING -> READY or BROKEN."""

    COMPILING = "compiling"
    READY = "ready"
    BROKEN = "broken"


class Grammar:
    def __init__(self, params: GuidedDecodingParams, compiled: Future[Compiled]) -> None:
        self.params = params
        self.num_leases = 0
        """Requests in flight that use it."""
        self._compiled = compiled

    @property
    def state(self) -> GrammarState:
        if not self._compiled.done():
            return GrammarState.COMPILING
        return GrammarState.BROKEN if self._compiled.exception() is not None else GrammarState.READY

    @property
    def reason(self) -> str:
        """Why it is BROKEN, for the client."""
        error = self._compiled.exception()
        return str(error) if isinstance(error, GrammarRefused) else CRASHED

    @property
    def compiled(self) -> Compiled:
        """Of one that is READY."""
        return self._compiled.result()

    def drop(self) -> None:
        """Nobody needs it: it is not compiled if that has not begun."""
        self._compiled.cancel()


class Grammars:
    def __init__(
        self, tokenizer_folder: str | Path, vocab_size: int, max_batch_size: int, make_library: MakeLibrary
    ) -> None:
        """Begins to read the vocabulary."""
        self._max_grammars = max_batch_size + MAX_IDLE
        self._vocab_size = vocab_size
        self._grammars: OrderedDict[GuidedDecodingParams, Grammar] = OrderedDict()  # least recently used first
        self._compiling = ThreadPoolExecutor(1, "inflight-grammars")
        self._library = self._compiling.submit(_load_library, Path(tokenizer_folder), vocab_size, make_library)
        self._masks: MaskThread | None = None
        self._forced_text: ForcedText | None = None

    def lease(self, params: GuidedDecodingParams) -> None:
        """A request needs this grammar from now on. To be followed by exactly one `release`."""
        grammar = self._grammars.get(params)
        if grammar is None:
            self._make_room()
            grammar = self._grammars[params] = Grammar(params, self._compiling.submit(self._compile, params))
        grammar.num_leases += 1
        self._grammars.move_to_end(params)

    def release(self, params: GuidedDecodingParams) -> None:
        """A request that had leased it has ended."""
        grammar = self._grammars[params]
        grammar.num_leases -= 1
        if not grammar.num_leases and grammar.state is not GrammarState.READY:
            # A broken one is refused anew, should it come again; one that nobody waits for need not be compiled.
            self._drop(grammar)

    def find(self, params: GuidedDecodingParams) -> Grammar | None:
        """The grammar, if it is leased or kept."""
        return self._grammars.get(params)

    def start(self, grammar: Grammar, end_ids: list[int]) -> Output:
        """An output that follows a grammar which is READY."""
        if self._masks is None or self._forced_text is None:
            vocabulary, library = self._library.result()
            self._masks = MaskThread(library, self._vocab_size)
            self._forced_text = ForcedText(vocabulary, library)
        return Output(grammar.compiled.start(), end_ids, self._forced_text)

    def submit(self, batch: list[Work]) -> None:
        """Do this for outputs that have started, behind all that was submitted before."""
        if self._masks is not None:
            self._masks.submit(batch)

    def __len__(self) -> int:
        return len(self._grammars)

    def close(self) -> None:
        """End the threads."""
        self._compiling.shutdown(wait=True, cancel_futures=True)
        if self._masks is not None:
            self._masks.close()
        self._grammars.clear()

    def _compile(self, params: GuidedDecodingParams) -> Compiled:
        """On the thread that compiles."""
        try:
            _, library = self._library.result()
            return library.compile(params)
        except GrammarRefused:
            raise
        except Exception:
            logger.exception("compiling a grammar failed")
            raise

    def _make_room(self) -> None:
        """Drop grammars without a lease until there is room for one more."""
        idle = [each for each in self._grammars.values() if not each.num_leases]
        for grammar in idle[: max(len(self._grammars) - self._max_grammars + 1, 0)]:
            self._drop(grammar)

    def _drop(self, grammar: Grammar) -> None:
        grammar.drop()
        del self._grammars[grammar.params]


def _load_library(folder: Path, vocab_size: int, make_library: MakeLibrary) -> tuple[Vocabulary, GrammarLibrary]:
    """Raises GrammarRefused where no guide can be followed."""
    try:
        vocabulary = load_vocabulary(folder, vocab_size)
    except ValueError as error:
        raise GrammarRefused(f"guided decoding is not possible: {error}") from None
    return vocabulary, make_library(vocabulary)
