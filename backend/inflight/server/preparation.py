"""What a request needs before the engine can have it: its tokens, and what will make text of its output.

All the work that grows with a request's text is done here. Knows items; nothing of threads or of the engine.
"""

from __future__ import annotations

from inflight.request import Request
from inflight.server.request_builder import RequestBuilder
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.work_item import Prompt, WorkItem
from inflight.text.detokenizer import Detokenizer
from inflight.text.text_decoder import make_text_decoder, prompt_text
from inflight.text.tokenizer import Tokenizer


class Preparation:
    """Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, builder: RequestBuilder, exclude_input_in_output: bool) -> None:
        """`exclude_input_in_output`: for requests that do not say."""
        self._tokenizer = tokenizer
        self._builder = builder
        self._exclude_input = exclude_input_in_output

    def prepare(self, item: WorkItem) -> None:
        """Raises RequestError if the item cannot be served, or is not wanted any more."""
        item.check_wanted()
        client = item.client
        request = self._builder.build(client, item.request.request_id, item.request.client_id)
        decoder = make_text_decoder(self._tokenizer, request.input_token_ids)
        detokenizer = Detokenizer(decoder, client.stop_words or [], request.sampling_config.min_tokens)
        item.prepare(request, detokenizer, self._echo(client, request))
        item.check_wanted()

    def _echo(self, client: ClientRequest, request: Request) -> Prompt | None:
        exclude = client.exclude_input_in_output
        if client.stream or (self._exclude_input if exclude is None else exclude):
            return None
        text = prompt_text(self._tokenizer, request.input_token_ids) if client.text is None else client.text
        return Prompt(text=text, token_ids=tuple(request.input_token_ids))
