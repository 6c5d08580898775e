"""Beam search through tritonserver: hypotheses, their log probabilities, and what is refused.

pytest ci/L0_llm/test_beam_search.py
"""

from __future__ import annotations

import pytest
from raw_stream import RawStream
from server_metrics import wait_for_rest
from server_process import ServerProcess

PROMPT = {
    "text_input": "Once upon a time there was a little",
    "exclude_input_in_output": True,
    "return_log_probs": True,
}
BEAMS = {**PROMPT, "max_tokens": 12, "end_id": -1, "beam_width": 4, "num_return_sequences": 3, "length_penalty": 1.0}


def test_the_best_hypotheses_are_answered_with_their_log_probabilities(server: ServerProcess) -> None:
    with RawStream(server.grpc_url) as raw:
        greedy = raw.ask({**PROMPT, "max_tokens": 12, "end_id": -1})
        answer = raw.ask(BEAMS)
        assert not answer.error and answer.num_finals == 1
        assert [int(response["sequence_index"][0]) for response in answer.responses] == [0, 1, 2]
        assert all(response["finish_reason"][0] == b"length" for response in answer.responses)
        scores = [float(response["cum_log_probs"][0]) for response in answer.responses]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] >= sum(greedy.responses[0]["output_log_probs"][0]) - 0.1
        hypotheses = [response["output_ids"][0].tolist() for response in answer.responses]
        assert len({tuple(tokens) for tokens in hypotheses}) == 3
        for response, score in zip(answer.responses, scores, strict=True):
            assert float(response["output_log_probs"].sum()) == pytest.approx(score, abs=1e-3)
            assert response["text_output"][0]
        # The model's own account of the best hypothesis, as a prompt.
        prompt = raw.ask({**PROMPT, "max_tokens": 1, "exclude_input_in_output": False}).responses[0]["output_ids"][0]
        text = [*prompt.tolist()[:-1], *hypotheses[0]]
        asked = raw.ask({"input_ids": text, "max_tokens": 1, "return_prompt_log_probs": True}).responses[0]
        assert float(asked["prompt_log_probs"][-12:].sum()) == pytest.approx(scores[0], abs=0.3)
        assert [response["output_ids"][0].tolist() for response in raw.ask(BEAMS).responses] == hypotheses
    wait_for_rest(server)


def test_a_streamed_search_sends_all_so_far_and_ends_with_the_hypotheses(server: ServerProcess) -> None:
    with RawStream(server.grpc_url) as raw:
        options = {**BEAMS, "beam_width_array": [1, 2, 4], "beam_search_diversity_rate": 0.25}
        whole, streamed = raw.ask(options), raw.ask({**options, "stream": True})
        assert not streamed.error and streamed.num_finals == 1
        last = {int(response["sequence_index"][0]): response for response in streamed.responses}
        for index, response in enumerate(whole.responses):
            for name in ("output_ids", "text_output", "cum_log_probs", "finish_reason"):
                assert last[index][name].tolist() == response[name].tolist()
        best = [r for r in streamed.responses if int(r["sequence_index"][0]) == 0]
        lengths = [response["output_ids"].shape[1] for response in best]
        assert lengths == sorted(lengths) and lengths[-1] == 12
    wait_for_rest(server)


def test_a_search_that_is_stopped_answers_with_the_best_so_far(server: ServerProcess) -> None:
    with RawStream(server.grpc_url) as raw, RawStream(server.grpc_url) as other:
        answer = raw.send({**BEAMS, "max_tokens": 2000}, request_id="beams")
        # Requests of one stream arrive in order: once this one is refused, the one before it is in flight.
        assert raw.ask({"max_tokens": 1}).error
        other.ask({**PROMPT, "max_tokens": 20, "end_id": -1})
        other.ask({"stop": True}, request_id="beams")
        raw.collect(answer)
        assert not answer.error and answer.num_finals == 1 and len(answer.responses) == 3
        assert all(response["finish_reason"][0] == b"cancelled" for response in answer.responses)
        assert all(0 < response["output_ids"].shape[1] < 2000 for response in answer.responses)
    wait_for_rest(server)


def test_what_cannot_be_done_is_refused_with_a_sentence(server: ServerProcess) -> None:
    with RawStream(server.grpc_url) as raw:
        assert "beam search does not sample" in raw.ask({**BEAMS, "temperature": 0.7}).error
        assert (
            "beam_width must be between 1 and max_batch_size 64, got 65" in raw.ask({**BEAMS, "beam_width": 65}).error
        )
        error = raw.ask({**BEAMS, "num_return_sequences": 5}).error
        assert "num_return_sequences (5) must not be above beam_width (4)" in error
        error = raw.ask({**BEAMS, "beam_search_diversity_rate": -1.0}).error
        assert "beam_search_diversity_rate must be between 0 and" in error
