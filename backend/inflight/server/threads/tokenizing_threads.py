"""The threads that tokenise requests and pass them to the engine, so that execute() never waits for a tokenizer.

A megabyte of text takes a good part of a second. Short and long requests therefore have a thread each, which serves
them in their order of arrival, so that neither kind delays the other; those with images, which may take seconds, have
another one. Knows nothing of tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from inflight.server.tensors.client_request import ClientRequest
from inflight.server.threads.sending_thread import log_failure

Item = TypeVar("Item")

MAX_SHORT_LENGTH = 16_384
"""Most characters and token ids of a short request, which is tokenised in a few milliseconds."""
BYTES_PER_CHARACTER = 128
"""Bytes of embeddings, or of an adapter, that take as long to check and to pack as a character to tokenise."""


class TokenizingThreads(Generic[Item]):
    """Started once, stopped once. All items that were put before stop() are handled before it returns."""

    def __init__(self, take: Callable[[Item], None]) -> None:
        """`take(item)` is called on one of the threads for each item, to pass it to the engine or to answer it."""
        self._short = _Lane("inflight-text-short", take)
        self._long = _Lane("inflight-text-long", take)
        self._images = _Lane("inflight-text-images", take)
        self._lanes = (self._short, self._long, self._images)

    def start(self) -> None:
        for lane in self._lanes:
            lane.start()

    def put(self, item: Item, length: int, *, has_images: bool = False) -> None:
        """Queue an item, which belongs to one of the threads from now on. `length`: see `text_length`."""
        lane = self._short if length <= MAX_SHORT_LENGTH else self._long
        (self._images if has_images else lane).items.put(item)

    @property
    def num_waiting(self) -> int:
        return sum(lane.items.qsize() for lane in self._lanes)

    def join(self) -> None:
        """Wait until no item is queued or being handled."""
        for lane in self._lanes:
            lane.items.join()

    def stop(self) -> None:
        for lane in self._lanes:
            lane.stop()


class _Lane(Generic[Item]):
    def __init__(self, name: str, take: Callable[[Item], None]) -> None:
        self.items: queue.Queue[Item | None] = queue.Queue()
        self._take = take
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.items.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take_one():
            pass

    def _take_one(self) -> bool:
        """Returns False at the end. A function of its own, so that the thread keeps no reference to an item while it
        waits for the next one."""
        item = self.items.get()
        try:
            if item is not None:
                self._take(item)
        except Exception as error:
            log_failure("taking a request", error)
        finally:
            self.items.task_done()
        return item is not None


def text_length(client: ClientRequest) -> int:
    """Number of characters and token ids to process. Bad words count twice, because they are tokenised twice,
    and a text counts for each passage. Numbers
    that the request brings count as the characters that take as long."""
    words = [*(client.stop_words or ()), *2 * (client.bad_words or []), *(client.embedding_bias_words or ())]
    tables = (client.prompt_embedding_table, client.prompt_embeds)
    num_bytes = sum(len(table.data) for table in tables if table is not None)
    num_bytes += 0 if client.lora_weights is None else client.lora_weights.nbytes
    passages = client.passages or ()
    num_characters = len(client.text or "") * max(len(passages), 1) + sum(map(len, passages))
    num_characters += len(client.input_ids or ()) + sum(map(len, words))
    num_characters += len(client.resume_token or "") + sum(map(len, client.sequences or ()))
    return num_characters + num_bytes // BYTES_PER_CHARACTER
