"""Makes a call of what a body asks for: prepared for the engine, and noted for the answer."""

from __future__ import annotations

from collections.abc import Callable

from inflight.asking.ask import Ask
from inflight.asking.refusal import Words
from inflight.asking.served import Served
from inflight.http.api_error import in_words
from inflight.http.call import Call, fresh_id
from inflight.http.encoders import check_generates
from inflight.http.log_probs import LogProbWriter
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

    def call(
        self,
        ask: Ask,
        words: Words,
        limits: RequestLimits,
        model: str,
        *,
        id_prefix: str,
        client_id: str = "",
        includes_usage: bool = False,
        scores_only: bool = False,
        shows_ids: bool = False,
    ) -> Call:
        """All the work that grows with a request's text is done here: to be called on a text thread. `words`: the
        dialect's, for what is refused. `shows_ids`: whether log probabilities name tokens by number. Raises
        APIError."""
        check_generates(limits)
        with in_words(words):
            prepared = self.served.prepare(ask, limits)
        log_probs = None
        if ask.show.output.return_log_probs:
            log_probs = LogProbWriter(self._texts, as_ids=shows_ids, shows_special=ask.show.special_tokens)
        return Call(
            ask=ask,
            prepared=prepared,
            words=words,
            model=model,
            includes_usage=includes_usage,
            log_probs=log_probs,
            scores_only=scores_only,
            system_fingerprint=self._fingerprint(),
            id_prefix=id_prefix,
            client_id=client_id or fresh_id(),
        )
