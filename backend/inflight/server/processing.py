"""Text to tokens and tokens to text for clients that ask for these steps alone, as tensorrtllm_backend's models do.

Needs the tokenizer and the engine's limits; no request goes to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from inflight.errors import InvalidRequest
from inflight.request_limits import RequestLimits
from inflight.server.tensors.chunk import Chunk
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.processing import POSTPROCESSING, PREPROCESSING, Preprocessed
from inflight.server.tensors.tensor_values import Array
from inflight.text.text_decoder import make_text_decoder
from inflight.text.tokenizer import Tokenizer

NONE = -1
"""The end or padding token of a checkpoint that has none."""


class Process(Protocol):
    """Safe to use from several threads."""

    def answer(self, clients: Sequence[ClientRequest]) -> list[Sequence[object]]:
        """For each prompt of a request what its dialect's outputs are attributes of, for each of its sequences. Raises
        InvalidRequest with one sentence."""


class Preprocessing:
    """Text and words to tokens."""

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._end_id = NONE if tokenizer.eos_id is None else tokenizer.eos_id
        self._pad_id = self._end_id if tokenizer.pad_id is None else tokenizer.pad_id

    def answer(self, clients: Sequence[ClientRequest]) -> list[Sequence[object]]:
        prompts = [self._encode(client) for client in clients]
        longest = max(map(len, prompts))
        bad_words = self._word_lists([client.bad_words for client in clients])
        stop_words = self._word_lists([client.stop_words for client in clients])
        return [
            [self._preprocessed(client, prompt, longest, bad, stop)]
            for client, prompt, bad, stop in zip(clients, prompts, bad_words, stop_words, strict=True)
        ]

    def _encode(self, client: ClientRequest) -> list[int]:
        token_ids = self._tokenizer.encode(client.text) if client.text else []
        if not token_ids:
            raise InvalidRequest("the prompt is empty: give at least one character")
        return token_ids

    def _preprocessed(
        self, client: ClientRequest, prompt: list[int], longest: int, bad_words: Array, stop_words: Array
    ) -> Preprocessed:
        assert client.max_tokens is not None
        # No token of a text is a row of an embedding table: only these have an extra id that is not 0.
        extra_ids = None if client.prompt_table_extra_ids is None else [0] * longest
        return Preprocessed(
            input_ids=prompt + [self._pad_id] * (longest - len(prompt)),
            input_length=len(prompt),
            bad_words=bad_words,
            stop_words=stop_words,
            embedding_bias=self._embedding_bias(client),
            max_tokens=client.max_tokens,
            end_id=self._end_id if client.end_id is None else client.end_id,
            pad_id=self._pad_id if client.pad_id is None else client.pad_id,
            prompt_table_extra_ids=extra_ids,
        )

    def _word_lists(self, lists: Sequence[list[str] | None]) -> list[Array]:
        """For each prompt [2, n] int32, with the same n."""
        encoded = [[self._tokenizer.encode_plain(word) for word in words or ()] for words in lists]
        sizes = [sum(map(len, words)) for words in encoded]
        width = max(0 if lists[0] is None else 1, *sizes)
        found: list[Array] = []
        for words, size in zip(encoded, sizes, strict=True):
            ends = list(accumulate(len(word) for word in words if word))
            ids = [token for word in words for token in word]
            padded = [ids + [0] * (width - size), ends + [-1] * (width - len(ends))]
            found.append(np.array(padded, np.int32).reshape(2, width))
        return found

    def _embedding_bias(self, client: ClientRequest) -> Array:
        """A word's weight is that of each of its tokens; they add up."""
        words, weights = client.embedding_bias_words, client.embedding_bias_weights
        if words is None or weights is None:
            return np.empty(0, np.float32)
        if len(words) != len(weights):
            raise InvalidRequest(
                f"EMBEDDING_BIAS_WORDS has {len(words)} entries and EMBEDDING_BIAS_WEIGHTS {len(weights)}"
            )
        bias = np.zeros(self._limits.vocab_size, np.float32)
        for word, weight in zip(words, weights, strict=True):
            for token in set(self._tokenizer.encode_plain(word)):
                if token >= len(bias):
                    raise InvalidRequest(f"EMBEDDING_BIAS_WORDS has token {token}, which the network does not have")
                bias[token] += weight
        return bias


class Postprocessing:
    """Tokens to text, each sequence by itself. Special tokens have none."""

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits) -> None:
        self._tokenizer = tokenizer

    def answer(self, clients: Sequence[ClientRequest]) -> list[Sequence[object]]:
        return [[Chunk(text=self._text(token_ids)) for token_ids in self._sequences(client)] for client in clients]

    @staticmethod
    def _sequences(client: ClientRequest) -> list[list[int]]:
        """Without their padding. A length beyond a row's end is the row's, one below 0 is 0."""
        sequences, lengths = client.sequences or [], client.sequence_lengths or []
        if not sequences or len(sequences) != len(lengths):
            raise InvalidRequest(
                f"SEQUENCE_LENGTH must have a length for each sequence of TOKENS_BATCH, which has {len(sequences)}; "
                f"got {len(lengths)}"
            )
        return [token_ids[: max(length, 0)] for token_ids, length in zip(sequences, lengths, strict=True)]

    def _text(self, token_ids: list[int]) -> str:
        if min(token_ids, default=0) < 0:
            raise InvalidRequest(f"TOKENS_BATCH holds {min(token_ids)}, which is no token id, before SEQUENCE_LENGTH")
        decoder = make_text_decoder(self._tokenizer, [])
        return "".join(map(decoder.push, token_ids)) + decoder.flush()


PROCESSES: Mapping[str, type[Preprocessing] | type[Postprocessing]] = {
    PREPROCESSING.name: Preprocessing,
    POSTPROCESSING.name: Postprocessing,
}
"""By the dialect's name."""
