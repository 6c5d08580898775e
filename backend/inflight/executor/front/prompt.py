"""What a program of the library asks to continue: text, token ids or embeddings, to one list of tokens.

Knows the tokenizer and prompt adapters; nothing of requests or of the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from inflight.asking.prompt_encoder import PromptEncoder
from inflight.errors import InvalidRequest
from inflight.executor.front.prompt_adapters import PromptAdapterRequest, PromptAdapters
from inflight.prompt_tuning import EmbeddingTable, PromptTuningConfig, virtual_tokens
from inflight.request_limits import RequestLimits

Prompt = str | list[int] | EmbeddingTable
"""Text, token ids, or the embeddings of the whole prompt."""


class ReadPrompt(NamedTuple):
    token_ids: list[int]
    tuning: PromptTuningConfig | None
    """The embeddings of those that are beyond the vocabulary."""


class PromptReader:
    """Safe to use from several threads."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._adapters = PromptAdapters()

    def read(
        self,
        prompt: Prompt,
        limits: RequestLimits,
        *,
        adapter: PromptAdapterRequest | None = None,
        query_token_ids: list[int] | None = None,
        tuning: PromptTuningConfig | None = None,
    ) -> ReadPrompt:
        """The prompt's tokens, behind those of the `adapter` and before those of the query.

        `tuning`: embeddings for ids of the prompt that are beyond the vocabulary. Raises InvalidRequest, also where two
        of the arguments bring embeddings.
        """
        brings = [prompt if isinstance(prompt, EmbeddingTable) else None, adapter, tuning]
        if sum(each is not None for each in brings) > 1:
            raise InvalidRequest(
                "a prompt of embeddings, prompt_adapter_request and prompt_tuning_config exclude each other"
            )
        query = query_token_ids or []
        table = prompt if isinstance(prompt, EmbeddingTable) else None
        token_ids: list[int] = []
        if not isinstance(prompt, EmbeddingTable):
            token_ids = self._encoder.encode(prompt, limits)
        if adapter is not None:
            table = self._adapters.load(adapter)
        if table is not None:
            limits.check_table(table)
            tuning = PromptTuningConfig(embedding_table=table)
            token_ids = virtual_tokens(table, limits.vocab_size) + token_ids
        return ReadPrompt(token_ids + query if query else token_ids, tuning)
