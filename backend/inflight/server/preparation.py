"""What a request needs before the engine can have it: its tokens, and what will make text of its output.

All the work that grows with a request's text is done here. Knows items; nothing of threads or of the engine.
"""

from __future__ import annotations

from inflight.request import Request
from inflight.server.request_builder import RequestBuilder
from inflight.server.sequence_output import Prompt, SequenceOutput
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.text.detokenizer import Detokenizer
from inflight.server.text.stop_strings import StopStrings
from inflight.server.text.text_decoder import make_text_decoder, prompt_text
from inflight.server.text.tokenizer import Tokenizer
from inflight.server.work_item import WorkItem


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
        item.prepare(request, self._outputs(client, request))
        item.check_wanted()

    def _outputs(self, client: ClientRequest, request: Request) -> list[SequenceOutput]:
        echo = self._echo(client, request)
        stop_strings = StopStrings(client.stop_words) if client.stop_words else None

        def output(index: int) -> SequenceOutput:
            decoder = make_text_decoder(self._tokenizer, request.input_token_ids)
            detokenizer = Detokenizer(decoder, stop_strings, request.sampling_config.min_tokens)
            return SequenceOutput(index, detokenizer, echo)

        return [output(index) for index in range(request.num_return_sequences)]

    def _echo(self, client: ClientRequest, request: Request) -> Prompt | None:
        exclude = client.exclude_input_in_output
        if client.stream or (self._exclude_input if exclude is None else exclude):
            return None
        text = prompt_text(self._tokenizer, request.input_token_ids) if client.text is None else client.text
        return Prompt(text=text, token_ids=tuple(request.input_token_ids))
