"""Beam search on a real network: tokens and scores of transformers' generate(num_beams=...), whatever else runs.

Run: pytest ci/unit/runtime/test_beam_search.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from network_engine import Engine
from tiny_checkpoints import make_checkpoint, make_prompt
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from inflight.batch_manager.callbacks import Callbacks
from inflight.config import SchedulerPolicy
from inflight.errors import RequestError
from inflight.output_config import OutputConfig
from inflight.request import Request
from inflight.result import FinishReason
from inflight.sampling_config import SamplingConfig

pytestmark = pytest.mark.slow

END_IDS = list(range(0, 203, 9))
"""So many that hypotheses end at all lengths."""
EARLY_STOPPING = {0: False, 1: True, 2: "never"}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"], ids=["keys and values", "states of sequences"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param).folder


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=128, max_num_tokens=10)
    yield engine
    engine.runner.close()


def beam_request(number: int, length: int, width: int, **options: Any) -> Request:
    """`options` of SamplingConfig, and others of Request."""
    names = ("length_penalty", "early_stopping", "min_tokens", "no_repeat_ngram_size")
    names += ("beam_width_array", "beam_search_diversity_rate")
    sampling = {name: options.pop(name) for name in names if name in options}
    return Request(
        request_id=number,
        input_token_ids=make_prompt(length, seed=number),
        sampling_config=SamplingConfig(beam_width=width, **sampling),
        output_config=OutputConfig(return_log_probs=True),
        **{"max_tokens": 12, "end_ids": END_IDS, "num_return_sequences": width, **options},
    )


def all_kinds() -> list[Request]:
    """Widths, penalties and ways to stop; prompts that end within a block, at its end and at its beginning."""
    requests: list[Request] = []
    for width in (2, 3, 4):
        for length_penalty in (0.0, 1.0, 2.0, -0.5):
            for early_stopping in EARLY_STOPPING:
                number = len(requests) + 1
                requests.append(
                    beam_request(
                        number,
                        1 + number % 19,
                        width,
                        length_penalty=length_penalty,
                        early_stopping=early_stopping,
                        max_tokens=(1, 5, 12, 23)[number % 4],
                        end_ids=END_IDS if number % 5 else [],
                        num_return_sequences=1 + number % width,
                    )
                )
    return requests


def ends_with(request: Request, tokens: list[int], place: int) -> bool:
    """Whether the token at `place` completes a stop word."""
    return any(tokens[max(place + 1 - len(word), 0) : place + 1] == word for word in request.stop_words)


class EndsWith(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, request: Request, num_prompt: int) -> None:
        self.request, self.num_prompt = request, num_prompt

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        rows = [row[self.num_prompt :] for row in input_ids.tolist()]
        return torch.tensor([ends_with(self.request, row, len(row) - 1) for row in rows])


def by_transformers(network: Any, request: Request) -> list[tuple[list[int], float]]:
    """Tokens and score of each hypothesis. Computed as generate() does it with these arguments."""
    sampling, num_prompt = request.sampling_config, len(request.input_token_ids)
    found = network.generate(
        torch.tensor([request.input_token_ids]),
        do_sample=False,
        num_beams=sampling.beam_width,
        num_return_sequences=request.num_return_sequences,
        length_penalty=sampling.length_penalty,
        early_stopping=EARLY_STOPPING[sampling.early_stopping],
        max_new_tokens=request.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        bad_words_ids=request.bad_words or None,
        eos_token_id=request.end_ids or None,
        stopping_criteria=StoppingCriteriaList([EndsWith(request, num_prompt)]) if request.stop_words else None,
        pad_token_id=request.end_ids[0] if request.end_ids else 0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    hypotheses = []
    for row, score in zip(found.sequences[:, num_prompt:].tolist(), found.sequences_scores.tolist(), strict=True):
        ends = [place for place, token in enumerate(row) if token in request.end_ids or ends_with(request, row, place)]
        hypotheses.append((row[: ends[0] + 1] if ends else row, score))
    return hypotheses


def check(engine: Engine, network: Any, request: Request) -> None:
    expected = by_transformers(network, request)
    assert len(expected) == request.num_return_sequences
    for index, (tokens, score) in enumerate(expected):
        (result,) = engine.results[request.request_id, index]
        assert result.output_token_ids == tokens, (request.request_id, index)
        length_penalty = request.sampling_config.length_penalty
        assert result.cum_log_prob / len(tokens) ** length_penalty == pytest.approx(score, abs=2e-4, rel=1e-4)
        assert math.isclose(sum(result.log_probs), result.cum_log_prob, abs_tol=1e-4)
        assert len(result.log_probs) == len(tokens)
        if ends_with(request, tokens, len(tokens) - 1):
            assert result.finish_reason is FinishReason.STOP_WORDS
        else:
            ended = tokens[-1] in request.end_ids
            assert result.finish_reason is (FinishReason.END_ID if ended else FinishReason.LENGTH)
    finals = [result.is_final for index in range(len(expected)) for result in engine.results[request.request_id, index]]
    assert sum(finals) == 1


def test_beams_are_those_of_transformers(engine: Engine, network: Any) -> None:
    """Side by side, of different widths in one batch, with chunked prompts."""
    requests = all_kinds()
    engine.serve(requests)
    for request in requests:
        check(engine, network, request)
    assert len({len(engine.tokens(request.request_id)) for request in requests}) > 5, "hypotheses end at all lengths"
    assert engine.kv_cache.num_used_blocks == 0


def test_forbidden_tokens_are_forbidden_in_every_beam(engine: Engine, network: Any) -> None:
    """They depend on the history of each beam, which moves between rows."""
    plain = beam_request(100, 9, 4, end_ids=[], max_tokens=20)
    engine.serve([plain])
    tokens = engine.tokens(100)
    words = [[tokens[1]], tokens[4:6], tokens[6:9]]
    requests = [
        beam_request(101, 9, 4, bad_words=words, max_tokens=20),
        beam_request(102, 14, 3, no_repeat_ngram_size=1, max_tokens=20, end_ids=[]),
        beam_request(103, 6, 2, no_repeat_ngram_size=2, max_tokens=24, end_ids=[]),
        *(
            beam_request(number, 6, 3, no_repeat_ngram_size=1, max_tokens=24, end_ids=ends, early_stopping=2)
            for number, ends in enumerate((END_IDS[::2], END_IDS[1::2], END_IDS[::3], END_IDS[1::3]), 110)
        ),
        beam_request(104, 6, 4, min_tokens=7),
    ]
    requests[0] = Request(**{**_fields(requests[0]), "input_token_ids": plain.input_token_ids})
    engine.serve(requests)
    for request in requests:
        check(engine, network, request)
    assert engine.tokens(101) != tokens


def test_stop_words_end_hypotheses_as_a_stopping_criterion_does(engine: Engine, network: Any) -> None:
    plain = [beam_request(120 + number, 5 + number, 3, end_ids=[], max_tokens=16) for number in range(6)]
    engine.serve(plain)
    requests = []
    for request in plain:
        tokens = [engine.tokens(request.request_id, index) for index in range(3)]
        words = [tokens[0][4:6], tokens[1][7:8], tokens[2][9:12], [202, 1]]
        fields = {**_fields(request), "request_id": request.request_id + 10, "stop_words": words}
        requests.append(Request(**fields))
    engine.serve(requests)
    for request in requests:
        check(engine, network, request)
    assert any(
        engine.results[request.request_id, 0][0].finish_reason is FinishReason.STOP_WORDS for request in requests
    )


@dataclass
class Text:
    tokens: list[int]
    total: float

    def score(self, request: Request) -> float:
        return float(self.total / len(self.tokens) ** request.sampling_config.length_penalty)


def by_definition(network: Any, request: Request) -> list[Text]:
    """The hypotheses of a search with widths and a diversity rate: every text computed anew, every choice sorted whole.

    `early_stopping` must be 2: then what is left undone after an early end could not have changed the best hypotheses.
    """
    sampling, ends = request.sampling_config, set(request.end_ids)
    beams, done = [Text([], 0.0)], []
    for step in range(request.max_tokens):
        width = sampling.beam_width_array[min(step, len(sampling.beam_width_array) - 1)]
        texts = torch.tensor([[*request.input_token_ids, *beam.tokens] for beam in beams])
        with torch.inference_mode():
            log_probs = network(texts).logits[:, -1].log_softmax(1).tolist()
        children = [
            (rank * sampling.beam_search_diversity_rate, Text([*beam.tokens, token], beam.total + log_prob))
            for rank, (beam, row) in enumerate(zip(beams, log_probs, strict=True))
            for token, log_prob in enumerate(row)
        ]
        children.sort(key=lambda child: -(child[0] + child[1].total))
        ordered = [text for _, text in children[: (1 + len(ends)) * width if ends else 2 * width]]
        last = step == request.max_tokens - 1
        done += [text for text in ordered[:width] if last or text.tokens[-1] in ends]
        done = sorted(done, key=lambda text: -text.score(request))[: sampling.beam_width]
        beams = [text for text in ordered if text.tokens[-1] not in ends][:width]
    return done[: request.num_return_sequences]


def test_widths_and_diversity_are_what_their_definition_says(engine: Engine, network: Any) -> None:
    kinds: list[dict[str, Any]] = [
        {"beam_width_array": [1, 2, 4]},
        {"beam_width_array": [4, 2], "num_return_sequences": 2},
        {"beam_width_array": [4], "beam_search_diversity_rate": 0.5},
        {"beam_width_array": [4], "beam_search_diversity_rate": 3.0},
        {"beam_width_array": [3, 1, 4], "beam_search_diversity_rate": 1.0, "length_penalty": 0.0},
    ]
    requests = [
        beam_request(140 + number, 4 + number, 4, early_stopping=2, max_tokens=9, **{"end_ids": ends, **kind})
        for number, (kind, ends) in enumerate((kind, ends) for kind in kinds for ends in ([], [7, 100]))
    ]
    engine.serve(requests)
    for request in requests:
        expected = by_definition(network, request)
        for index, text in enumerate(expected):
            (result,) = engine.results[request.request_id, index]
            assert result.output_token_ids == text.tokens, (request.request_id, index)
            assert result.cum_log_prob == pytest.approx(text.total, abs=1e-3)
    assert engine.kv_cache.num_used_blocks == 0


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


@pytest.mark.parametrize("enable_reuse", [True, False])
@pytest.mark.parametrize(
    ("policy", "num_blocks"),
    [
        (SchedulerPolicy.GUARANTEED_NO_EVICT, 128),
        (SchedulerPolicy.STATIC_BATCH, 128),
        (SchedulerPolicy.MAX_UTILIZATION, 40),
    ],
)
def test_beams_beside_other_requests(
    folder: Path, network: Any, policy: SchedulerPolicy, num_blocks: int, enable_reuse: bool
) -> None:
    """Greedy and sampled neighbours keep their tokens, and with MAX_UTILIZATION searches and neighbours are paused."""
    neighbours = [
        Request(
            request_id=200 + number,
            input_token_ids=make_prompt(5 + 3 * number, seed=number),
            max_tokens=20,
            sampling_config=SamplingConfig(temperature=float(number % 2), seed=number),
            output_config=OutputConfig(return_log_probs=True),
        )
        for number in range(6)
    ]
    alone = Engine(folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=64, max_num_tokens=64)
    for request in neighbours:
        alone.serve([request])
    alone.runner.close()
    beams = all_kinds()[::3]
    requests = [request for pair in zip(neighbours, beams[:6], strict=True) for request in pair] + beams[6:]
    engine = Engine(
        folder,
        policy=policy,
        num_blocks=num_blocks,
        max_num_tokens=16,
        max_batch_size=14,
        enable_reuse=enable_reuse,
    )
    engine.serve(requests)
    for request in beams:
        check(engine, network, request)
    for request in neighbours:
        assert engine.tokens(request.request_id) == alone.tokens(request.request_id)
    paused_searches = engine.paused & {request.request_id for request in beams}
    # The hypotheses of the network with states end earlier, and fewer searches need blocks at a time.
    least = 2 if network.config.model_type == "qwen3" else 1
    assert (len(paused_searches) >= least) == (policy is SchedulerPolicy.MAX_UTILIZATION)
    assert engine.kv_cache.num_used_blocks == 0
    engine.runner.close()


def test_a_prompt_is_computed_once_and_its_prefix_is_reused(engine: Engine, network: Any) -> None:
    first, again = beam_request(300, 18, 4), beam_request(301, 18, 4)
    again = Request(**{**_fields(again), "input_token_ids": first.input_token_ids})
    engine.serve([first])
    engine.serve([again])
    for request in (first, again):
        check(engine, network, request)
    assert [engine.tokens(300, index) for index in range(4)] == [engine.tokens(301, index) for index in range(4)]


def test_logits_that_are_not_finite_are_one_error(folder: Path) -> None:
    engine = Engine(folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=32, max_num_tokens=16)
    errors: list[RequestError | None] = []
    engine._send = lambda request_id, result, is_final, error: errors.append(error)  # type: ignore[method-assign]
    engine._manager._callbacks = Callbacks(get_inference_requests=engine._get, send_response=engine._send)
    embedding = engine.runner._computation.decoder.embedding.weight_UD  # type: ignore[attr-defined]
    with torch.inference_mode():
        embedding[5] = float("nan")
        engine.serve([Request(**{**_fields(beam_request(1, 4, 3)), "input_token_ids": [3, 4, 5, 6, 7, 8]})])
    assert len(errors) == 1 and "not finite" in str(errors[0])
    assert engine.kv_cache.num_used_blocks == 0
    engine.runner.close()
