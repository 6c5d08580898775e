"""What requests of other backends' clients mean, and what they are answered with: the tables, without a server."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from llm_tensors import READ_LIMITS, build_asked
from wrong_values import WRONG_REQUESTS, WRONG_SAMPLING

from inflight.errors import InvalidRequest
from inflight.result import PerfMetrics
from inflight.server.tensors.chunk import Chunk
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import ANY_ONE, Dialect
from inflight.server.tensors.dialects import (
    DIALECTS,
    ENSEMBLE,
    LLM,
    LLMAPI,
    TENSORRT_LLM,
    TENSORRT_LLM_BLS,
    VLLM_MODEL,
)
from inflight.server.tensors.sampling_parameters import PARAMETERS


def arrays(dialect: Dialect, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Plain values as the dialect's tensors, with its batch dimension; arrays as they are."""
    made = {}
    for name, value in inputs.items():
        tensor = dialect.inputs_by_name[name]
        if not isinstance(value, np.ndarray):
            values = value if isinstance(value, list) else [value]
            encoded = [each.encode() if isinstance(each, str) else each for each in values]
            value = np.array(encoded, tensor.dtype.numpy_type)[(None,) * dialect.batched]
        made[name] = value
    return made


def read(dialect: Dialect, inputs: dict[str, Any], parameters: dict[str, Any] | None = None) -> ClientRequest:
    return dialect.read(arrays(dialect, inputs), READ_LIMITS, parameters)


def sampling(parameters: dict[str, Any] | str, **inputs: Any) -> ClientRequest:
    text = parameters if isinstance(parameters, str) else json.dumps(parameters)
    return read(VLLM_MODEL, {"text_input": "hi", "sampling_parameters": text, **inputs})


# -- vLLM --------------------------------------------------------------------------------------------------------------


def test_vllm_defaults() -> None:
    client = read(VLLM_MODEL, {"text_input": "hi"})
    assert (client.max_tokens, client.temperature, client.top_p, client.top_k) == (16, 1.0, 1.0, 0)
    assert client.exclude_input_in_output is None and client.num_log_probs is None


def test_sampling_parameters_may_be_text() -> None:
    said = {"max_tokens": "100", "temperature": "0", "top_p": "0.5", "top_k": "-1", "n": "2", "seed": "7"}
    client = sampling(said | {"ignore_eos": "True", "logit_bias": '{"5": "-1.5"}', "stop": "end"})
    assert (client.max_tokens, client.temperature, client.top_p, client.top_k) == (100, 0.0, 0.5, 0)
    assert (client.num_return_sequences, client.seed, client.end_id, client.stop_words) == (2, 7, -1, ["end"])
    assert (client.logit_bias_ids, client.logit_bias_values) == ([5], [-1.5])


def test_sampling_parameters_of_other_types() -> None:
    client = sampling(
        {
            "stop": ["a"],
            "stop_token_ids": [3, "4"],
            "bad_words": ["b"],
            "seed": -2,
            "min_p": 0.25,
            "logprobs": 3,
            "lora_name": "pirate",
            "max_tokens": None,
            "temperature": None,
            "best_of": 1,
            "skip_special_tokens": True,
        }
    )
    assert (client.stop_words, client.stop_word_ids, client.bad_words) == (["a"], [[3], [4]], ["b"])
    assert (client.seed, client.min_p, client.num_log_probs, client.lora_name) == (2**64 - 2, 0.25, 3, "pirate")
    assert (client.max_tokens, client.temperature, client.shows_special) == (2**31 - 2, 1.0, False)
    assert sampling({"skip_special_tokens": "false"}).shows_special
    assert sampling({"stop": ""}).stop_words == sampling({"stop": []}).stop_words == []


@pytest.mark.parametrize(
    ("guide", "kind", "text"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ('{"regex": "a+"}', "regex", "a+"),
        ({"choice": ["yes", 'n"o']}, "choice", r'["yes", "n\"o"]'),
        ({"json_object": True, "regex": None}, "json", None),
        ({"grammar": "root ::= [a-z]+"}, "ebnf_grammar", "root ::= [a-z]+"),
        ({"grammar": 'a: "b"\n?start: a'}, "lark_grammar", 'a: "b"\n?start: a'),
        ({"grammar": 'root ::= "start: "', "backend": "auto", "disable_fallback": True}, "ebnf_grammar", None),
    ],
)
def test_structured_outputs(guide: Any, kind: str, text: str | None) -> None:
    client = sampling({"structured_outputs": guide})
    assert client.guide_type == kind and (text is None or client.guide == text)
    assert client.guide_white_space is None


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"disable_any_whitespace": True}, ("compact", True, None)),
        ({"whitespace_pattern": "\\s*", "strict": False}, ("free", False, None)),
        ({"whitespace_pattern": "", "strict": True, "backend": "guidance"}, (None, True, "guidance")),
        ({"disable_any_whitespace": False, "disable_additional_properties": True}, (None, True, None)),
    ],
)
def test_what_vllms_clients_say_beside_a_guide(options: dict[str, Any], fields: tuple[Any, ...]) -> None:
    for key in ("structured_outputs", "guided_decoding"):
        client = sampling({key: {"json": {"type": "object"}, **options}})
        assert (client.guide_white_space, client.guide_is_strict, client.guide_backend) == fields


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("[1]", "must be a JSON object"),
        ("{", "not valid JSON"),
        ({"max_token": 3}, "sampling_parameters has an unknown key max_token: did you mean max_tokens"),
        ({"\n" + "x" * 500: 3}, r"unknown key \\nx{40,300}\.\.\.$"),
        ({"skip_special_tokens": 3}, "skip_special_tokens must be true or false"),
        ({"max_tokens": "many"}, "max_tokens must be a number"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"temperature": True}, "temperature must be a number"),
        ('{"temperature": NaN}', "temperature must be a number"),
        ({"stop": 3}, "stop must be a text or a list"),
        ({"logprobs": -1}, "num_log_probs must be between 0 and 20, got -1"),
        ({"best_of": 4}, "best_of is not supported"),
        ({"include_stop_str_in_output": "true"}, "include_stop_str_in_output is not supported"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids is not supported"),
        ({"ignore_eos": 3}, "ignore_eos must be true or false"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, r"structured_outputs\.whitespace_pattern is not supp"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "x", "disable_any_whitespace": True}}, "give one"),
        ({"structured_outputs": {"json": {}, "backend": 3}}, "backend must be a text"),
        ({"structured_outputs": {"json": {}, "strict": "no"}}, "strict must be true or false"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": "no"}}, "must be true or false"),
        ({"structured_outputs": {"jsn": {}}}, "unknown"),
        ({"structured_outputs": {"choice": []}}, "choice must be"),
        ({"stop": ["a", ""]}, "^stop must hold no empty text$"),
        ({"bad_words": [""]}, "^bad_words must hold no empty text$"),
        ({"bad_words": ["\ud800"]}, "not valid JSON"),
        ({"structured_outputs": '{"regex": "\\ud800"}'}, "not valid JSON"),
        *(
            ({parameter.name: wrong.value}, re.escape(wrong.sentence))
            for parameter in PARAMETERS
            for wrong in (*WRONG_SAMPLING, *WRONG_REQUESTS)
            if wrong.field == parameter.field and wrong.is_json
        ),
    ],
)
def test_wrong_sampling_parameters_are_refused_in_words(parameters: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        build_asked(sampling(parameters))


def test_each_sampling_parameter_is_honoured_or_has_a_reason() -> None:
    for parameter in PARAMETERS:
        assert bool(parameter.set) == bool(parameter.field) != bool(parameter.reason)
        if parameter.set is None and parameter.neutral is not None:
            with pytest.raises(InvalidRequest, match=f"{parameter.name} is not supported: "):
                sampling({parameter.name: 77})


def test_request_parameters_stand_in_for_the_tensor() -> None:
    parameters = {"max_tokens": "9", "request_priority": 1, "triton_enable_empty_final_response": True, "other": "x"}
    assert read(VLLM_MODEL, {"text_input": "hi"}, parameters).max_tokens == 9
    both = {"text_input": "hi", "sampling_parameters": "{}"}
    assert read(VLLM_MODEL, both, parameters).max_tokens == 16
    assert read(LLM, {"text_input": "hi", "max_tokens": 3}, parameters).max_tokens == 3


def test_a_vllm_stream_cannot_repeat_its_prompt() -> None:
    with pytest.raises(InvalidRequest, match="`exclude_input_in_output` = False is not allowed"):
        sampling({}, stream=True, exclude_input_in_output=False)
    assert sampling({}, stream=True, exclude_input_in_output=True).stream


def test_vllm_outputs_hold_all_sequences() -> None:
    client = sampling({"n": 2, "logprobs": 1}, return_finish_reason=True, return_num_output_tokens=True)
    assert VLLM_MODEL.gathers(client)
    chunks = [Chunk(text="a", finish_reason="stop", num_output_tokens=2), Chunk(text="b", finish_reason="None")]
    written = VLLM_MODEL.write(chunks, client, None)
    assert {name: array.tolist() for name, array in written.items()} == {
        "text_output": [b"a", b"b"],
        "finish_reason": [b"stop", b"None"],
        "num_output_tokens": [2, 0],
    }
    assert written["num_output_tokens"].dtype == np.uint32


def test_vllm_log_probs_are_json() -> None:
    client = sampling({"logprobs": 2}, return_logprobs=True, return_cumulative_logprob=True)
    chunk = Chunk(
        token_ids=[9, 5, 7],  # the first is of the prompt
        log_probs=[-0.5, -4.0],
        cum_log_prob=-4.5,
        top_token_ids=np.array([[5, 6], [5, 6]]),
        top_log_probs=np.array([[-0.5, -1.0], [-0.25, -2.0]]),
        text_of_token=chr,
    )
    written = VLLM_MODEL.write([chunk], client, None)
    assert json.loads(written["logprobs"][0]) == [
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "\x05"},
            "6": {"logprob": -1.0, "rank": 2, "decoded_token": "\x06"},
        },
        {
            "7": {"logprob": -4.0, "rank": None, "decoded_token": "\x07"},
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": "\x05"},
            "6": {"logprob": -2.0, "rank": 2, "decoded_token": "\x06"},
        },
    ]
    assert written["cumulative_logprob"] == [-4.5]
    assert VLLM_MODEL.write([Chunk()], client, frozenset({"logprobs"}))["logprobs"].tolist() == [b"null"]


# -- TensorRT-LLM ------------------------------------------------------------------------------------------------------

TOKENS = {"input_ids": [5, 6, 7], "input_lengths": 2, "request_output_len": 4}
TEXT = {"text_input": "hi", "max_tokens": 4}


def test_padding_of_the_prompt_is_cut_off() -> None:
    assert read(TENSORRT_LLM, TOKENS).prompt_ids == [5, 6]
    with pytest.raises(InvalidRequest, match="input_lengths is 4"):
        _ = read(TENSORRT_LLM, TOKENS | {"input_lengths": 4}).prompt_ids


@pytest.mark.parametrize(
    ("said", "top_k", "top_p"),
    [
        ({}, 1, 1.0),
        ({"runtime_top_k": 0, "runtime_top_p": 0.0}, 1, 1.0),
        ({"runtime_top_k": 4}, 4, 1.0),
        ({"runtime_top_p": 0.5}, 0, 0.5),
        ({"runtime_top_k": 4, "runtime_top_p": 0.5}, 4, 0.5),
    ],
)
def test_without_a_limit_tensorrt_llm_is_greedy(said: dict[str, Any], top_k: int, top_p: float) -> None:
    client = read(TENSORRT_LLM, {**TOKENS, **said, "temperature": 0.5})
    assert (client.top_k, client.top_p, client.temperature) == (top_k, top_p, 0.5)


def test_all_beams_are_answered_unless_fewer_are_wanted() -> None:
    assert read(TENSORRT_LLM, TOKENS | {"beam_width": 3}).num_return_sequences == 3
    assert read(TENSORRT_LLM, TOKENS | {"beam_width": 3, "num_return_sequences": 2}).num_return_sequences == 2
    assert read(TENSORRT_LLM, TOKENS).num_return_sequences is None


def test_names_of_the_inner_model() -> None:
    client = read(
        TENSORRT_LLM,
        TOKENS
        | {
            "stop_words_list": np.array([[[7, 8, 9, 0], [2, 3, -1, -1]]], np.int32),
            "len_penalty": 0.5,
            "early_stopping": True,
            "streaming": True,
            "random_seed": 3,
            "min_length": 2,
        },
    )
    assert (client.stop_word_ids, client.length_penalty, client.early_stopping) == ([[7, 8], [9]], 0.5, 1)
    assert client.early_stopping is not True, "a number, as the engine's messages need"
    assert (client.stream, client.seed, client.min_tokens, client.end_id) == (True, 3, 2, -1)
    assert read(ENSEMBLE, TEXT).end_id is None, "text ends with the tokenizer's own"


def test_older_and_signed_types_are_read_where_a_config_has_them() -> None:
    given = arrays(TENSORRT_LLM, TOKENS) | {
        "request_output_len": np.array([[4]], np.uint32),
        "seed": np.array([[-1]], np.int64),
    }
    client = TENSORRT_LLM.read(given, READ_LIMITS)
    assert (client.max_tokens, client.seed) == (4, 2**64 - 1)


@pytest.mark.parametrize("dialect", [LLM, TENSORRT_LLM, ENSEMBLE], ids=lambda dialect: dialect.name)
def test_two_names_of_one_option_must_agree(dialect: Dialect) -> None:
    prompt = TOKENS if dialect is TENSORRT_LLM else TEXT
    assert read(dialect, prompt | {"min_tokens": 2, "min_length": 2}).min_tokens == 2
    with pytest.raises(InvalidRequest, match="min_tokens and min_length set the same option"):
        read(dialect, prompt | {"min_tokens": 2, "min_length": 3})


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_what_cannot_be_honoured_is_refused_with_its_reason(dialect: Dialect) -> None:
    for tensor in dialect.inputs:
        if tensor.is_refused:
            several = ANY_ONE in (tensor.neutral or ())
            value = np.full((1 + several,) * len(tensor.dims), b"x" if tensor.dtype.name == "STRING" else 77)
            with pytest.raises(InvalidRequest, match=f"{tensor.name} is not supported: "):
                tensor.values(value.astype(tensor.dtype.numpy_type), READ_LIMITS)
            for neutral in {77 if each is ANY_ONE else each for each in tensor.neutral or ()}:
                assert tensor.values(np.array([neutral], tensor.dtype.numpy_type), READ_LIMITS) == {}
            assert tensor.values(np.zeros((0,) * len(tensor.dims), tensor.dtype.numpy_type), READ_LIMITS) == {}


def test_a_batch_dimension_where_the_wire_has_one() -> None:
    client = read(TENSORRT_LLM, TOKENS | {"return_log_probs": True, "return_generation_logits": True})
    chunk = Chunk(token_ids=[1, 2], log_probs=[-1.0, -2.0], text="x", generation_logits=np.zeros((2, 300)))
    shapes = {name: array.shape for name, array in TENSORRT_LLM.write([chunk], client, None).items()}
    assert shapes == {
        "output_ids": (1, 1, 2),
        "sequence_length": (1, 1),
        "cum_log_probs": (1, 1),
        "output_log_probs": (1, 1, 2),
        "generation_logits": (1, 1, 2, 300),
    }
    text = read(ENSEMBLE, TEXT)
    assert {name: array.shape for name, array in ENSEMBLE.write([chunk], text, None).items()} == {"text_output": (1,)}


def test_beams_lie_below_each_other_and_are_padded() -> None:
    client = read(TENSORRT_LLM, TOKENS | {"beam_width": 2, "return_log_probs": True})
    assert TENSORRT_LLM.gathers(client) and not TENSORRT_LLM.gathers(read(TENSORRT_LLM, TOKENS))
    chunks = [
        Chunk(token_ids=[1, 2, 3], log_probs=[-1.0] * 3, cum_log_prob=-3.0),
        Chunk(sequence_index=1, token_ids=[4], log_probs=[-2.0], cum_log_prob=-2.0),
    ]
    written = TENSORRT_LLM.write(chunks, client, None)
    assert written["output_ids"].tolist() == [[[1, 2, 3], [4, -1, -1]]]
    assert written["sequence_length"].tolist() == [[3, 1]]
    assert written["output_log_probs"].tolist() == [[[-1, -1, -1], [-2, -1, -1]]]
    assert written["cum_log_probs"].tolist() == [[-3, -2]]


def test_llmapis_names_and_metrics_as_text() -> None:
    client = read(
        LLMAPI,
        {
            "text_input": "hi",
            "streaming": True,
            "sampling_param_top_k": 3,
            "sampling_param_stop": ["a", "b"],
            "sampling_param_exclude_input_from_output": True,
            "sampling_param_return_perf_metrics": True,
            "return_cumulative_logprob": True,
        },
    )
    assert (client.max_tokens, client.stream, client.top_k, client.stop_words) == (32, True, 3, ["a", "b"])
    metrics = PerfMetrics(arrival_time_ns=5, kv_cache_reused_blocks=1, kv_cache_missed_blocks=3)
    written = LLMAPI.write([Chunk(text="x", perf_metrics=metrics)], client, None)
    assert written["arrival_time_ns"].tolist() == [b"5"] and written["kv_cache_hit_rate"].tolist() == [b"0.25"]
    assert written["kv_cache_reused_block"].tolist() == [b"1"]
    assert written["cumulative_logprob"].tolist() == [b"0.0"]
    with pytest.raises(InvalidRequest, match="exactly one value"):
        read(LLMAPI, {"text_input": ["a", "b"]})


@pytest.mark.parametrize(
    ("said", "top_k"),
    [({}, 1), ({"temperature": 0.5}, 0), ({"top_p": 0.5}, 0), ({"top_k": 0}, 0), ({"top_k": 7}, 7)],
    ids=str,
)
def test_llmapi_is_greedy_unless_its_request_says_how_to_sample(said: dict[str, Any], top_k: int) -> None:
    client = read(LLMAPI, {"text_input": "hi", **{f"sampling_param_{key}": value for key, value in said.items()}})
    assert client.top_k == top_k
    assert client.temperature == said.get("temperature", 1.0) and client.top_p == said.get("top_p", 1.0)


def test_a_top_p_of_0_keeps_the_likeliest_token_alone() -> None:
    client = read(LLMAPI, {"text_input": "hi", "sampling_param_top_p": 0.0})
    assert client.top_p is not None and 0 < client.top_p < 1e-6


def test_llmapis_reasons_are_none_before_the_end() -> None:
    client = read(LLMAPI, {"text_input": "hi", "return_stop_reason": True, "return_finish_reason": True})
    chunks = [Chunk(text="a", finish_reason=LLMAPI.unfinished), Chunk(text="ab", finish_reason="stop", stop_string="c")]
    reasons = [LLMAPI.write([chunk], client, None) for chunk in chunks]
    assert [each["stop_reason"].tolist() for each in reasons] == [[b"None"], [b"c"]]
    assert [each["finish_reason"].tolist() for each in reasons] == [[b"None"], [b"stop"]]


def test_an_output_that_is_named_is_asked_for() -> None:
    wanted = LLM.wanted(["text_output", "top_log_probs", "context_hidden_states", "sequence_index"])
    assert LLM.fields_for(wanted) == {
        "num_log_probs": 1,
        "gather_context": True,
        "additional_outputs": ("hidden_states",),
    }
    assert set(LLM.write([Chunk()], ClientRequest(), frozenset({"sequence_index", "finish_reason"}))) == {
        "sequence_index",
        "finish_reason",
    }


@pytest.mark.parametrize("names", [[], [output.name for output in TENSORRT_LLM_BLS.outputs]], ids=["none", "all"])
def test_who_names_every_output_wants_none_in_particular(names: list[str]) -> None:
    assert TENSORRT_LLM_BLS.wanted(names) is None
    assert TENSORRT_LLM_BLS.fields_for(None) == {}


def test_a_model_may_offer_fewer_outputs_than_its_dialect_has() -> None:
    fewer = LLM.offering(["text_output", "cum_log_probs"])
    assert fewer.wanted(["text_output", "cum_log_probs"]) is None, "what tritonserver names if a request names none"
    assert set(fewer.write([Chunk()], ClientRequest(), None)) == {"text_output"}


def test_a_stop_needs_no_prompt() -> None:
    empty = {"input_ids": np.zeros((1, 0), np.int32), "input_lengths": 0, "request_output_len": 0}
    assert read(TENSORRT_LLM, {**empty, "stop": True}).stop
