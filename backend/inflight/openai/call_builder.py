"""Bodies to calls: what a body asks for is prepared for the engine, and noted for the answer.

All the work that grows with a request's text is done here, on a thread of its own. Raises APIError.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight.asking.ask import Ask
from inflight.asking.chat import Chat
from inflight.asking.refusal import Words
from inflight.asking.served import Served
from inflight.lora import LoRARequest
from inflight.openai.api_error import in_words
from inflight.openai.asks import chat_ask, completion_ask, scores_only
from inflight.openai.bounded_fields import read_request_id
from inflight.openai.call import Call, fresh_id
from inflight.openai.fields import Body, ChatBody, CompletionBody, check_fields, check_stream_options
from inflight.openai.log_probs import LogProbWriter
from inflight.request_limits import RequestLimits
from inflight.text.token_texts import TokenTexts
from inflight.text.tokenizer import Tokenizer


class CallBuilder:
    """Safe to use from several threads."""

    def __init__(self, served: Served, tokenizer: Tokenizer, fingerprint: Callable[[], str] = str) -> None:
        """`fingerprint`: tells the engine's, "" = unknown."""
        self.served = served
        self._texts = TokenTexts(tokenizer)
        self._fingerprint = fingerprint

    def chat(self, body: ChatBody, limits: RequestLimits, model: str, adapter: LoRARequest | None) -> Call:
        check_fields(body)
        includes_usage = check_stream_options(body)
        return self._of_body(body, *chat_ask(body, limits, adapter), limits, model, includes_usage=includes_usage)

    def completion(self, body: CompletionBody, limits: RequestLimits, model: str, adapter: LoRARequest | None) -> Call:
        check_fields(body)
        includes_usage = check_stream_options(body)
        ask, words = completion_ask(body, limits, adapter)
        return self._of_body(body, ask, words, limits, model, includes_usage=includes_usage)

    def _of_body(
        self, body: Body, ask: Ask, words: Words, limits: RequestLimits, model: str, *, includes_usage: bool
    ) -> Call:
        return self.call(
            ask,
            words,
            limits,
            model,
            client_id=read_request_id(body.request_id),
            includes_usage=includes_usage,
            scores_only=isinstance(body, CompletionBody) and scores_only(body),
            shows_ids=bool(body.return_tokens_as_token_ids),
        )

    def call(
        self,
        ask: Ask,
        words: Words,
        limits: RequestLimits,
        model: str,
        *,
        client_id: str = "",
        includes_usage: bool = False,
        scores_only: bool = False,
        shows_ids: bool = False,
    ) -> Call:
        """`words`: the dialect's, for what is refused. `shows_ids`: whether log probabilities name tokens by number."""
        with in_words(words):
            prepared = self.served.prepare(ask, limits)
        log_probs = None
        if ask.show.output.return_log_probs:
            log_probs = LogProbWriter(self._texts, as_ids=shows_ids, shows_special=ask.show.special_tokens)
        return Call(
            ask=ask,
            prepared=prepared,
            words=words,
            is_chat=isinstance(ask.prompt, Chat),
            model=model,
            includes_usage=includes_usage,
            log_probs=log_probs,
            scores_only=scores_only,
            system_fingerprint=self._fingerprint(),
            client_id=client_id or fresh_id(),
        )
