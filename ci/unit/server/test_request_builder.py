"""Requests built from tensors: defaults, and a sentence for every wrong value."""

from __future__ import annotations

import re

import fake_tokenizer
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from llm_tensors import BEAMS, LIMITS, OK, READ_LIMITS, build, read
from wrong_values import NO_FLOAT32, WRONG_REQUESTS, WRONG_SAMPLING

from inflight.errors import InvalidRequest
from inflight.generation_defaults import GenerationDefaults
from inflight.request import Request
from inflight.sampling_config import SamplingConfig
from inflight.server.request_builder import RequestBuilder
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import TensorType
from inflight.server.tensors.dialects import LLM

TABLE = {"prompt_embedding_table": np.array([[1, 2], [3, 4]], np.float16)}
EMBEDS = {"prompt_embeds": np.array([[[1, 2], [3, 4], [5, 6]]], np.float32)}
EXTRA = np.array([7, 8], np.uint64)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"max_tokens": 4}, "text_input or input_ids or prompt_embeds is required"),
        ({**OK, "beam_width": 5}, "beam_width must be between 1 and max_batch_size 4, got 5"),
        ({**OK, **BEAMS, "num_return_sequences": 3}, r"num_return_sequences \(3\) must not be above beam_width \(2\)"),
        ({**OK, **BEAMS, "logits_post_processor_name": "x"}, "logits_post_processor_name is not supported together"),
        ({**OK, "logits_post_processor_name": "x"}, "'x', which this engine does not have; it has: none"),
        ({**OK, **BEAMS, "temperature": 0.5}, "beam search does not sample: leave out temperature, top_k, top_p"),
        ({**OK, **BEAMS, "repetition_penalty": 1.5}, "repetition_penalty is not supported together with beam_width"),
        ({**OK, **BEAMS, "presence_penalty": 0.5}, "presence_penalty is not supported together with beam_width"),
        ({**OK, **BEAMS, "frequency_penalty": 0.5}, "frequency_penalty is not supported together with beam_width"),
        ({**OK, **BEAMS, "stop_words": ["x"]}, "stop_words is not supported together with beam_width above 1"),
        ({**OK, **BEAMS, "num_log_probs": 2}, "num_log_probs is not supported together with beam_width above 1"),
        (
            {**OK, **BEAMS, "guided_decoding_guide_type": "json", "end_id": 2},
            "guided_decoding_guide_type is not supported together with beam_width above 1",
        ),
        ({**OK, **BEAMS, "return_prompt_log_probs": True}, "return_prompt_log_probs is not supported together with"),
        ({**OK, **BEAMS, "return_context_logits": True}, "return_context_logits is not supported together with"),
        ({**OK, **BEAMS, "return_generation_logits": True}, "return_generation_logits is not supported together with"),
        ({**OK, **BEAMS, "beam_width_array": [1, 3]}, "beam_width_array must be at most 1024 numbers between 1 and"),
        (
            {**OK, **BEAMS, "num_return_sequences": 2, "beam_width_array": [2, 1]},
            r"num_return_sequences \(2\) must not be above the last number of beams in beam_width_array",
        ),
        ({"text_input": "a"}, "max_tokens is required"),
        ({"text_input": "a", "input_ids": [1], "max_tokens": 4}, "text_input and input_ids exclude each other"),
        ({**OK, "text_input": ""}, "the prompt is empty"),
        ({"input_ids": [], "max_tokens": 4}, "the prompt is empty"),
        ({"input_ids": [1] * 64, "max_tokens": 4}, "the prompt has 64 tokens, more than max_input_len 63"),
        ({**OK, "text_input": "é" * 379}, "the prompt has 758 bytes, which make more than max_input_len 63 tokens"),
        ({**OK, "text_input": "é" * 378}, "the prompt has 756 tokens, more than max_input_len 63"),
        ({"input_ids": np.zeros((2, 3), np.int32), "max_tokens": 4}, "input_ids must be one row"),
        ({**OK, "text_input": b"\xff\xfe"}, "text_input is not valid UTF-8 at byte 0"),
        ({**OK, "text_input": "a" * 1001}, "text_input has 1001 bytes, more than 1000"),
        ({**OK, "text_input": "a" * 64}, "the prompt has 64 tokens, more than max_input_len 63"),
        ({**OK, "text_input": ["a", "b"]}, r"text_input must hold exactly one value, got shape \[2\]"),
        ({**OK, "max_tokens": [1, 2]}, "max_tokens must hold exactly one value"),
        ({**OK, "min_tokens": 5}, "min_tokens .5. must not be above max_tokens .4."),
        ({"input_ids": [1, 300], "max_tokens": 4}, "token id 300 is outside the vocabulary"),
        ({"input_ids": [-1], "max_tokens": 4}, "token id -1 is outside the vocabulary"),
        ({**OK, "top_k": -1}, "top_k must be between 0"),
        ({**OK, "end_id": 300}, "end_id must be -1"),
        ({**OK, "end_id": -2}, "end_id must be -1"),
        ({**OK, "stop_words": ["x"] * 100_000}, "stop_words has 100000 entries, more than 1024"),
        ({**OK, "stop_words": ["x" * 10_000_000]}, "stop_words holds 10000000 bytes, more than"),
        ({**OK, "stop_words": [b"\xc3"]}, "stop_words is not valid UTF-8"),
        ({**OK, "bad_words": ["x"] * 1025}, "bad_words has 1025 entries"),
        ({**OK, "top_p_reset_ids": 300}, "top_p_reset_ids must be -1"),
        ({**OK, "top_p_reset_ids": -2}, "top_p_reset_ids must be -1"),
        ({**OK, "logit_bias_ids": [1]}, "logit_bias_ids has 1 entries and logit_bias_values 0"),
        ({**OK, "logit_bias_ids": [1, 1], "logit_bias_values": [1.0, 2.0]}, "logit_bias_ids names a token twice"),
        ({**OK, "logit_bias_ids": [300], "logit_bias_values": [1.0]}, "logit_bias names token id"),
        ({**OK, "logit_bias_ids": [-1], "logit_bias_values": [1.0]}, "logit_bias names token id"),
        ({**OK, "logit_bias_ids": [1], "logit_bias_values": [float("nan")]}, "logit_bias must hold numbers between"),
        ({**OK, "logit_bias_ids": [1], "logit_bias_values": [float("-inf")]}, "logit_bias must hold numbers between"),
        ({**OK, "logit_bias_ids": [1] * 5000, "logit_bias_values": [1.0]}, "logit_bias_ids has 5000 entries"),
        ({**OK, "embedding_bias": [1.0, 2.0]}, "embedding_bias must hold one float32 for each of the 300 tokens"),
        ({**OK, "embedding_bias": [1.0] * 301}, "embedding_bias has 301 entries, more than 300"),
        ({**OK, "embedding_bias": [float("nan")] * 300}, "embedding_bias must hold numbers between"),
        ({**OK, "embedding_bias": np.zeros((2, 150), np.float32)}, "embedding_bias must be one row"),
        ({**OK, "embedding_bias_words": ["a"]}, "embedding_bias_words has 1 entries and embedding_bias_weights 0"),
        ({**OK, "embedding_bias_words": ["x" * 10_000] * 2}, "embedding_bias_words holds 20000 bytes, more than 16384"),
        ({**OK, "num_log_probs": 21}, "num_log_probs must be between 0 and 20, got 21"),
        ({**OK, "num_log_probs": -1}, "num_log_probs must be between 0 and 20, got -1"),
        (
            {**OK, "additional_outputs": ["attention"]},
            "additional_outputs names 'attention', which this model does not offer",
        ),
        ({**OK, "gather_context": True}, "gather_context needs additional_outputs"),
        ({**OK, "prompt_vocab_size": 2}, "need prompt_embedding_table"),
        ({**OK, "prompt_table_extra_ids": EXTRA}, "need prompt_embedding_table"),
        ({**OK, **TABLE, "prompt_vocab_size": 3}, "must be the number of rows of prompt_embedding_table, 2, got 3"),
        ({**OK, **TABLE, "prompt_table_extra_ids": EXTRA}, "prompt_table_extra_ids has 2 entries for 3 prompt tokens"),
        ({**OK, "prompt_embedding_table": np.zeros((2, 3), np.float16)}, "have 3 features, but those of this model"),
        ({**OK, "prompt_embedding_table": np.zeros((2, 2, 2), np.float16)}, r"must have shape \[rows, features\]"),
        ({**OK, "prompt_embedding_table": np.zeros(2, np.float16)}, r"must have shape \[rows, features\]"),
        ({**OK, "prompt_embedding_table": np.zeros((0, 2), np.float16)}, "at least one row"),
        # No byte, but so many rows that a token for each would fill the memory.
        ({**OK, "prompt_embedding_table": np.zeros((2**40, 0), np.float16)}, "at least one row and one feature"),
        ({"prompt_embeds": np.zeros((2**40, 0), np.float32), "max_tokens": 4}, "at least one row and one"),
        ({**OK, "prompt_embedding_table": np.full((2, 2), np.inf, np.float16)}, "must be finite numbers"),
        ({**OK, "prompt_embedding_table": np.zeros((2**24, 2), np.float16)}, "more than max_prompt_embedding_bytes"),
        ({"input_ids": [302], "max_tokens": 4, **TABLE}, "token id 302 is outside the vocabulary and the rows"),
        ({**OK, **EMBEDS}, "text_input and prompt_embeds exclude each other"),
        ({**EMBEDS, **TABLE, "max_tokens": 4}, "prompt_embeds are the whole prompt: leave out prompt_embedding_table"),
        ({**OK, **TABLE, "return_prompt_log_probs": True}, "return_prompt_log_probs is not supported together with"),
        ({**OK, "unheard_of": 1}, "an input tensor that this model does not have"),
        *(
            ({**OK, field: value}, re.escape(sentence) if wrong.is_json else f"{field} must be a finite number, got")
            for wrong in (*WRONG_SAMPLING, *WRONG_REQUESTS)
            for field, value, sentence in [wrong]
            if value != NO_FLOAT32
        ),
    ],
)
def test_a_wrong_value_is_one_clear_sentence(inputs: dict, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        build(inputs)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert len(str(caught.value)) < 256


def test_biases_of_tokens_and_words_add_up() -> None:
    asked = {
        **OK,
        "logit_bias_ids": [97, 5],
        "logit_bias_values": [1.0, 2.0],
        "embedding_bias_words": ["aba", "", "b"],
        "embedding_bias_weights": [0.5, 9.0, 0.25],
    }
    assert build(asked).sampling_config.logit_bias == {97: 1.5, 5: 2.0, 98: 0.75}


def test_embeddings_of_a_table_stand_before_a_text_and_where_the_ids_say() -> None:
    request = build({**OK, "text_input": "ab", **TABLE, "prompt_vocab_size": 2, "prompt_table_extra_ids": EXTRA[:1]})
    assert request.input_token_ids == [300, 301, 97, 98]
    tuning = request.prompt_tuning_config
    assert tuning is not None and tuning.input_token_extra_ids == [7, 7, 0, 0]
    assert tuning.embedding_table.rows(np.array([0, 1])).tolist() == [[1, 2], [3, 4]]
    placed = build({"input_ids": [5, 301, 6], "max_tokens": 4, **TABLE, "prompt_table_extra_ids": np.arange(3)})
    assert placed.input_token_ids == [5, 301, 6]
    assert placed.prompt_tuning_config is not None
    assert placed.prompt_tuning_config.input_token_extra_ids == [0, 1, 2]


def test_a_prompt_of_embeddings_has_ids_beyond_the_vocabulary() -> None:
    request = build({**EMBEDS, "max_tokens": 4})
    assert request.input_token_ids == [300, 301, 302]
    assert request.prompt_tuning_config is not None
    assert request.prompt_tuning_config.embedding_table.rows(np.array([2])).tolist() == [[5, 6]]


def test_an_empty_bias_asks_for_nothing() -> None:
    empty = np.empty(0, np.float32)
    assert build({**OK, "embedding_bias": empty}).sampling_config == build(OK).sampling_config


def test_a_stop_request_needs_no_prompt() -> None:
    assert read({"stop": True}).stop


@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_whatever_the_tensors_hold_is_read_or_refused(data) -> None:
    """Any shape and any value of the right type: never another exception than InvalidRequest."""
    inputs = {}
    for tensor in data.draw(st.lists(st.sampled_from(LLM.inputs), unique_by=lambda t: t.name)):
        shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
        if tensor.dtype is TensorType.STRING:
            values = data.draw(
                st.lists(st.binary(max_size=5), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
            )
            inputs[tensor.name] = np.array([*values, None], dtype=object)[:-1].reshape(shape)
        else:
            inputs[tensor.name] = data.draw(arrays.arrays(np.dtype(tensor.dtype.numpy_type), shape))
    try:
        client = LLM.read(inputs, READ_LIMITS)
        if not client.stop:
            RequestBuilder(fake_tokenizer.byte_tokenizer(), LIMITS, GenerationDefaults()).build(client, 1, "")
    except InvalidRequest as error:
        assert str(error)


@pytest.mark.parametrize(
    "given_values",
    [{}, {"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.9}, {"top_p": 0.0}, {"top_k": 0}],
)
def test_greedy_unless_something_asks_for_sampling(given_values: dict) -> None:
    sampling = build({**OK, **given_values}).sampling_config
    assert sampling.temperature == 0.0 and sampling.seed == 0


@pytest.mark.parametrize(
    "given_values", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"typical_p": 0.5}]
)
def test_any_sampling_value_samples_with_a_fresh_seed(given_values: dict) -> None:
    first, second = (build({**OK, **given_values}).sampling_config for _ in range(2))
    assert first.temperature == pytest.approx(given_values.get("temperature", 1.0))
    assert first.seed != second.seed


def test_a_given_seed_is_kept() -> None:
    assert build({**OK, "temperature": 1.0, "seed": 2**64 - 1}).sampling_config.seed == 2**64 - 1


def test_end_tokens_are_the_checkpoints_unless_said() -> None:
    tokenizer = fake_tokenizer.byte_tokenizer()
    assert build(OK).end_ids == tokenizer.end_ids != []
    assert build({**OK, "end_id": -1}).end_ids == []
    assert build({**OK, "end_id": 7}).end_ids == [7]


def test_stop_strings_need_every_token_as_it_comes() -> None:
    assert not build(OK).streaming
    assert build({**OK, "stop_words": ["x"]}).streaming
    assert build({**OK, "stream": True}).streaming


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert build({**OK, "temperature": 1e-39, "top_p": 0.9}).sampling_config.temperature == 0.0
    sampling = SamplingConfig(temperature=1e-39)
    with pytest.raises(InvalidRequest, match="temperature must be 0"):
        LIMITS.validate(Request(request_id=1, input_token_ids=[1], max_tokens=4, sampling_config=sampling))


def test_end_tokens_lie_in_the_vocabulary() -> None:
    """A checkpoint may name one that does not; a place in another row's logits must never come of it."""
    limits = msgspec.structs.replace(LIMITS, vocab_size=256)
    tokenizer = fake_tokenizer.byte_tokenizer()
    assert tokenizer.end_ids == [256]
    client = ClientRequest(input_ids=[1], max_tokens=4, min_tokens=2)
    assert RequestBuilder(tokenizer, limits, GenerationDefaults()).build(client, 1, "").end_ids == []
    for wrong in (-1, 256):
        with pytest.raises(InvalidRequest, match="end_ids holds a token id outside"):
            limits.validate(Request(request_id=1, input_token_ids=[1], max_tokens=4, end_ids=[wrong]))


def test_many_bad_words_are_fine_and_long_ones_are_too() -> None:
    many = [f"{n:04d}" for n in range(1024)]
    assert len(build({**OK, "bad_words": many}).bad_words) == 2048
    assert len(build({**OK, "bad_words": ["x" * 10_000]}).bad_words) == 2
    with pytest.raises(InvalidRequest, match=r"bad_words has 402 entries of up to 10001 tokens"):
        build({**OK, "bad_words": ["x" * 10_000, *many[:200]]})


def test_a_word_of_whitespace_bans_no_other() -> None:
    assert build({**OK, "bad_words": ["\n"]}).bad_words == [[10]]


def test_bad_words_are_banned_with_and_without_a_space_before() -> None:
    assert build({**OK, "bad_words": ["ab"]}).bad_words == [list(b"ab"), list(b" ab")]
