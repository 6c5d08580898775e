"""The choices of one call while the engine's responses to it arrive."""

from __future__ import annotations

from inflight.http.api_error import of_response, overloaded
from inflight.http.call import Call
from inflight.http.choice import Choice, TokenLogProb, read_prompt_log_probs
from inflight.http.dispatcher import Mailbox
from inflight.result import FinishReason, PerfMetrics, Response

ENDED_EARLY = "the engine was shut down before the answer was complete"

News = dict[Choice, str]
"""Choices that have got tokens, and the text that these complete."""


class Generation:
    """Knows no JSON and no HTTP."""

    def __init__(self, call: Call, request_ids: list[int], mailbox: Mailbox) -> None:
        """`request_ids`: of the call's prompts."""
        self._call = call
        self._mailbox = mailbox
        self._prompts = {request_id: index for index, request_id in enumerate(request_ids)}
        count = call.ask.choices
        self._choices = {
            request_id: [call.choice(prompt, index * count + each) for each in range(count)]
            for index, (request_id, prompt) in enumerate(zip(request_ids, call.prepared.prompts, strict=True))
        }
        self._num_unfinished = dict.fromkeys(request_ids, count)
        self.prompt_log_probs: dict[int, list[TokenLogProb]] = {}
        """By number of the prompt, if they were asked for."""
        self._perf_metrics: dict[int, PerfMetrics] = {}
        """By request. That of one which a stop string has ended comes too late."""
        self._num_cached: dict[int, int] = {}
        """By request, if there are any."""

    @property
    def choices(self) -> list[Choice]:
        """Of all prompts, in the order of their indices."""
        return [choice for choices in self._choices.values() for choice in choices]

    @property
    def is_done(self) -> bool:
        return not self._num_unfinished

    @property
    def num_tokens(self) -> int:
        """Generated so far, in all choices."""
        return 0 if self._call.scores_only else sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts, in the KV cache when they were begun."""
        return sum(self._num_cached.values())

    def timings(self) -> list[tuple[PerfMetrics, int]]:
        """(what the ranks tell, tokens of the longest choice) of each prompt that they have completed."""
        return [
            (perf, max(choice.num_tokens for choice in self._choices[request_id]))
            for request_id, perf in self._perf_metrics.items()
        ]

    def add(self, responses: list[Response]) -> News:
        """Raises APIError if one of the requests has failed: the call fails as a whole."""
        news: News = {}
        for response in responses:
            request_id, result = response.request_id, response.result
            if result is None:
                raise of_response(response, self._call.param_of(response.error_msg))
            if result.finish_reason is FinishReason.CANCELLED:
                raise overloaded(503, ENDED_EARLY)
            if result.num_cached_tokens:
                self._num_cached.setdefault(request_id, result.num_cached_tokens)
            if result.request_perf_metrics is not None:
                self._perf_metrics[request_id] = result.request_perf_metrics
            choice = self._choices[request_id][result.sequence_index]
            had_ended = bool(choice.finish_reason)
            if had_ended:
                continue
            if result.tensors:
                self._keep_prompt_log_probs(response)
            text = choice.add(result)
            news[choice] = news[choice] + text if choice in news else text
            if choice.finish_reason:
                self._finished(response)
        return news

    def _finished(self, response: Response) -> None:
        request_id = response.request_id
        self._num_unfinished[request_id] -= 1
        if self._num_unfinished[request_id]:
            return
        del self._num_unfinished[request_id]
        if not response.is_final:
            # Stop strings have ended all sequences, of which the ranks know nothing.
            self._mailbox.cancel(request_id)

    def _keep_prompt_log_probs(self, response: Response) -> None:
        assert response.result is not None
        index = self._prompts[response.request_id]
        prompt = self._call.prepared.prompts[index]
        if self._call.ask.show.output.return_prompt_log_probs and (
            found := read_prompt_log_probs(response.result, prompt.request.input_token_ids)
        ):
            self.prompt_log_probs[index] = found
