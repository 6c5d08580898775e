"""One request for a response: its conversation as a chat for the engine, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from inflight.asking.chat import Chat
from inflight.asking.chats import Chats
from inflight.http.api_error import in_words, invalid, unsupported
from inflight.http.call_builder import CallBuilder
from inflight.http.dialects.openai.responses.asks import OF_RESPONSE, response_ask, response_chat
from inflight.http.dialects.openai.responses.fields import LOG_PROBS, ResponseBody, check_body
from inflight.http.dialects.openai.responses.items import Item, read_items
from inflight.http.dialects.openai.responses.output_item import INCOMPLETE
from inflight.http.dialects.openai.responses.rendering import Keep, ResponseCall
from inflight.http.dialects.openai.responses.response_object import ResponseObject
from inflight.http.dialects.openai.responses.store import StoredResponse
from inflight.http.encoders import check_generates
from inflight.lora import LoRARequest
from inflight.request_limits import RequestLimits

Put = Callable[[str, StoredResponse], None]
"""Takes a response to be kept, by its id."""

ID_PREFIX = "resp_"

_encode = msgspec.json.Encoder().encode


class ResponseRequest:
    def __init__(self, body: ResponseBody, tenant: int, previous: StoredResponse | None, put: Put | None) -> None:
        """`tenant`: who asks. `previous`: the response that it continues. `put`: None if it is not to be kept."""
        self._body = body
        self._tenant = tenant
        self._previous = previous
        self._put = put
        self._input: list[dict[str, Any]] = (
            [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
        )

    def build(
        self, builder: CallBuilder, limits: RequestLimits, model: str, adapter: LoRARequest | None
    ) -> ResponseCall:
        """To be called on a text thread. Raises APIError."""
        body = self._body
        chats = builder.served.chats
        ask, words = response_ask(body, self._chat(), limits, adapter, keeps_token_ids=chats.splits_reasoning)
        call = builder.call(ask, words, limits, model, id_prefix=ID_PREFIX)
        format = call.prepared.format
        if body.wants_log_probs and format is not None:
            why = "the output may be more than text: leave out tools, and the operator's setting reasoning_parser"
            raise unsupported("include", f"{LOG_PROBS} is not given where {why}")
        prompt_ids = call.prepared.prompts[0].request.input_token_ids
        counter = None if format is None else chats.reasoning_tokens(format, prompt_ids)
        return ResponseCall(call, ResponseObject(body, call), counter, self._keep(_encode(self._input)))

    def count_tokens(self, chats: Chats, limits: RequestLimits) -> int:
        """Of its input, as the model gets it. To be called on a text thread. Raises APIError."""
        check_generates(limits)
        chat = self._chat()
        with in_words(OF_RESPONSE):
            chats.tools(chat)
            return len(chats.encode(chat, limits)[1])

    def _chat(self) -> Chat:
        body = self._body
        check_body(body)
        items = [*self._items_before(), *read_items(self._input)]
        if not items:
            raise invalid("input is empty: give at least one item", "input")
        return response_chat(body, items)

    def _items_before(self) -> list[Item]:
        """Of the conversation that the request continues."""
        before: list[dict[str, Any]] = []
        for turn in self._previous.turns if self._previous is not None else ():
            before += msgspec.json.decode(turn)
        if any(each.get("type") == "function_call" and each.get("status") == INCOMPLETE for each in before):
            why = "was cut within a function call: send the conversation as input, without that call"
            raise invalid(f"the response that previous_response_id names {why}", "previous_response_id")
        return read_items(before, "previous_response_id")

    def _keep(self, given: bytes) -> Keep:
        """`given`: the input as JSON."""
        before = () if self._previous is None else self._previous.turns

        def keep(response: dict[str, Any]) -> None:
            if self._put is not None:
                turns = (*before, given, _encode(response["output"]))
                self._put(response["id"], StoredResponse(self._tenant, _encode(response), turns))

        return keep
