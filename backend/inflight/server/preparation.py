"""What a request needs before it goes to the engine: the tokens of its prompt, and a detokenizer for its output.

All the work that grows with a request's text is done here. Knows work items; nothing of threads or of the engine.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from inflight.guides.requests import not_enforced
from inflight.request import Request
from inflight.server.beam_output import BeamOutput
from inflight.server.request_builder import RequestBuilder
from inflight.server.resumption import Resumption, seeded
from inflight.server.sequence_output import Prompt, SequenceOutput
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.work_item import WorkItem
from inflight.text.detokenizer import Detokenizer
from inflight.text.stop_strings import StopStrings
from inflight.text.text_decoder import make_text_decoder, prompt_text
from inflight.text.tokenizer import Tokenizer


class Preparation:
    """Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        builder: RequestBuilder,
        resumption: Resumption,
        exclude_input_in_output: bool,
        repeats: Collection[str] = (),
    ) -> None:
        """`exclude_input_in_output`: the default for requests that do not set it. `repeats`: see Dialect."""
        self._tokenizer = tokenizer
        self._builder = builder
        self._resumption = resumption
        self._exclude_input = exclude_input_in_output
        self._repeats = repeats

    def prepare(self, item: WorkItem) -> None:
        """Raises RequestError if the item cannot be served, or was cancelled or stopped meanwhile."""
        item.check_wanted()
        client = item.client
        token = self._resumption.read(client)
        said = client if token is None else seeded(client, token)
        request = self._builder.build(said, item.request.request_id, item.request.client_id)
        outputs = self._outputs(client, request)
        if token is None:
            writer = self._resumption.begin(client, request)
        else:
            request, delivered, writer = self._resumption.resume(client, request, token)
            for output, (sequence, finish_reason) in zip(outputs, delivered, strict=True):
                output.resume(sequence, finish_reason)
        left_out = not_enforced(request.guided_decoding_params, self._builder.limits)
        item.prepare(request, outputs, writer, [f"#{pointer} {keyword}" for pointer, keyword in left_out] or None)
        item.check_wanted()

    def _outputs(self, client: ClientRequest, request: Request) -> list[SequenceOutput]:
        echo = self._echo(client, request)
        shown = self._tokenizer.special_ids.difference(request.end_ids) if client.shows_special else frozenset[int]()
        stop_strings = StopStrings(client.stop_words) if client.stop_words else None

        def make_detokenizer() -> Detokenizer:
            decoder = make_text_decoder(self._tokenizer, request.input_token_ids, shown=shown)
            return Detokenizer(decoder, stop_strings, request.sampling_config.min_tokens)

        def output(index: int) -> SequenceOutput:
            if request.sampling_config.beam_width > 1:
                return BeamOutput(index, make_detokenizer, echo)
            return SequenceOutput(
                index,
                make_detokenizer(),
                echo,
                client.additional_outputs or (),
                partial(self._text_of_token, shown),
                self._repeats,
            )

        return [output(index) for index in range(request.num_return_sequences)]

    def _text_of_token(self, shown: frozenset[int], token_id: int) -> str:
        decoder = make_text_decoder(self._tokenizer, [], shown=shown)
        return decoder.push(token_id) + decoder.flush()

    def _echo(self, client: ClientRequest, request: Request) -> Prompt | None:
        exclude = client.exclude_input_in_output
        if client.lora_order or client.stream or (self._exclude_input if exclude is None else exclude):
            return None
        text = prompt_text(self._tokenizer, request.input_token_ids) if client.text is None else client.text
        return Prompt(text=text, token_ids=tuple(request.input_token_ids))
