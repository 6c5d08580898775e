"""How well one text answers another: by a cross-encoder's score of both, else by the angle between their vectors, of
question and answer with what the model wants before each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from inflight.asking.ask import Ask, TextPair
from inflight.asking.limit import Limit
from inflight.asking.refusal import Refusal
from inflight.asking.sentence_files import Activation
from inflight.asking.served import Served
from inflight.asking.show import Show
from inflight.asking.text_prompts import ChosenPrompt, TextPrompts, check_kept
from inflight.asking.vectors import Row, embedding_requests, unit_vectors
from inflight.lora import LoRARequest
from inflight.output_config import SCORES, AdditionalModelOutput, OutputConfig, Pooling
from inflight.request import Request
from inflight.request_limits import RequestLimits

MAX_CHARS = 2**26
"""Of all pairs: one long question is tokenised with each of many documents."""


class Scoring:
    """Of pairs that are asked for together. `num_chars`: of all their texts."""

    def __init__(
        self,
        pairs: list[TextPair],
        served: Served,
        limits: RequestLimits,
        vector_of: Pooling,
        prompts: TextPrompts,
    ) -> None:
        """Raises Refusal."""
        self._served = served
        self._limits = limits
        self._vector_of = vector_of
        if limits.pooled == "scores" and limits.num_labels != 1:
            raise Refusal(
                "model",
                "this model gives {count} scores of a pair, and none says how well one text answers the other",
                count=limits.num_labels,
            )
        self._counts = prompts.are_pooled
        question, answer = ("", "") if limits.pooled == "scores" else prompts.of_pairs()
        self._before = (question, answer)
        self.num_chars = sum(len(question + answer) + len(pair.first) + len(pair.second) for pair in pairs)
        if self.num_chars > MAX_CHARS:
            raise Refusal(
                "prompt",
                "all pairs of texts have {count} characters, more than {most}",
                count=self.num_chars,
                most=MAX_CHARS,
            )
        # Pairs share texts, such as one long question: each is copied once.
        firsts = {text: question + text for text in {pair.first for pair in pairs}}
        seconds = {text: answer + text for text in {pair.second for pair in pairs}}
        self._pairs = [TextPair(firsts[pair.first], seconds[pair.second]) for pair in pairs]
        texts = ((before, text) for pair in self._pairs for before, text in self._behind(pair))
        self._texts = sorted(dict.fromkeys(texts), key=lambda text: self._before.index(text[0]))
        """Each once, behind its prompt: of which vectors are made, where no network reads both texts of a pair."""

    def _behind(self, pair: TextPair) -> list[tuple[str, str]]:
        """Both texts of a pair, each with the prompt that it begins with."""
        return list(zip(self._before, (pair.first, pair.second), strict=True))

    def requests(self, adapter: LoRARequest | None, limit: Limit) -> list[Request]:
        """`limit`: see embedding_requests. Raises Refusal."""
        if self._limits.pooled != "scores":
            check_kept("".join(self._before), limit, self._limits)
            requests: list[Request] = []
            for before, group in groupby(self._texts, key=lambda text: text[0]):
                requests += embedding_requests(
                    [text for _, text in group],
                    None,
                    self._served,
                    self._limits,
                    adapter,
                    self._vector_of,
                    limit=limit,
                    begin_with=ChosenPrompt(before, counts=self._counts),
                )
            return requests
        ask = Ask(
            prompt=[*self._pairs],
            adapter=adapter,
            limit=limit,
            show=Show(output=OutputConfig(additional_model_outputs=[AdditionalModelOutput(name=SCORES)])),
        )
        return [prompt.request for prompt in self._served.prepare(ask, self._limits).prompts]

    def scores(self, rows: Sequence[Row], activation: Activation) -> list[float]:
        """Of each pair. `rows`: what the engine gives of `requests`. `activation`: of a network's scores; the cosine of
        two vectors stays what it is."""
        if self._limits.pooled != "scores":
            vectors = dict(zip(self._texts, unit_vectors([*rows], None), strict=True))
            pairs = [[vectors[text] for text in self._behind(pair)] for pair in self._pairs]
            return [float(np.dot(*pair)) for pair in pairs]
        found = np.array([row[0] for row in rows], np.float64)
        if activation == "sigmoid":
            found = 0.5 * (1.0 + np.tanh(0.5 * found))  # which never overflows
        scores: list[float] = found.tolist()
        return scores
