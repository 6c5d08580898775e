"""The thread that finds masks while the network runs: for all rows of a step at once, in the order of the steps."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue

import numpy as np

from inflight.runtime.guided.library import GrammarLibrary, Words
from inflight.runtime.guided.outputs import Mask, Work

logger = logging.getLogger(__name__)

FAILED = "the grammar could not be used: finding its next tokens failed"


class MaskThread:
    """Started with the first work. Other threads wait for it by the events of their work."""

    def __init__(self, library: GrammarLibrary, vocab_size: int) -> None:
        self._library = library
        self._num_words = -(-vocab_size // 32)
        self._words: Words = np.zeros((1, self._num_words), dtype=np.uint32)
        self._queue: SimpleQueue[list[Work] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, batch: list[Work]) -> None:
        """Do this, behind all that was submitted before."""
        if not batch:
            return
        is_done = threading.Event()
        for work in batch:
            work.is_done = is_done
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="inflight-masks", daemon=True)
            self._thread.start()
        self._queue.put(batch)

    def close(self) -> None:
        """Wait until all work is done, and end."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                self._do(batch)
            except Exception:
                logger.exception("finding masks failed")
                for work in batch:
                    # Nobody knows which of their tokens were taken in.
                    work.output.fail(FAILED)
                    work.masks = [Mask(b"", FAILED)] * (int(work.wants_mask) + len(work.drafts))
            finally:
                batch[0].is_done.set()

    def _do(self, batch: list[Work]) -> None:
        for work in batch:
            work.output.take(work.token_ids)
        of_grammar = [work for work in batch if work.output.needs_state()]
        if len(of_grammar) > len(self._words):
            self._words = np.zeros((len(of_grammar), self._num_words), dtype=np.uint32)
        firsts: dict[int, Mask] = {}
        if of_grammar:
            rows = self._words[: len(of_grammar)]
            found = self._library.fill([work.output.state for work in of_grammar], rows)
            for work, row, (may_end, error) in zip(of_grammar, rows, found, strict=True):
                firsts[id(work)] = work.output.mask(row, may_end, error)
        for work in batch:
            first = firsts.get(id(work))
            if first is None:  # it has ended, or cannot go on
                self._words[0].fill(0)
                first = work.output.mask(self._words[0], True, "")
            if work.wants_mask:
                work.masks.append(first)
            if work.drafts:
                one = self._words[:1]
                work.masks += work.output.masks_behind(work.drafts, first, self._library, one)
