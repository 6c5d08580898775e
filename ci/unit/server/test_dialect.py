"""What tensors mean: the tables, config.pbtxt beside them, defaults, and a sentence for every wrong value."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import fake_pb_utils as pb
import fake_tokenizer
import msgspec
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.grpc import model_config_pb2

from inflight.config import EngineConfig
from inflight.errors import InvalidRequest
from inflight.generation_defaults import GenerationDefaults
from inflight.request import Request, RequestLimits, SamplingConfig
from inflight.server.request_builder import RequestBuilder
from inflight.server.tensors.chunk import Chunk
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import Dialect, InputTensor, OutputTensor, TensorType
from inflight.server.tensors.dialects import DIALECTS, LLM
from inflight.server.tensors.request_parameters import read_parameters
from inflight.server.tensors.tensor_values import ReadLimits, read_word_ids
from inflight.text.safe_text import safe_text

REPOSITORY = Path(__file__).parents[3] / "model_repository"
LIMITS = RequestLimits(vocab_size=300, max_seq_len=64, max_input_len=63, kv_cache_tokens=1000, max_batch_size=4)
READ_LIMITS = ReadLimits(max_text_bytes=1000, max_input_len=LIMITS.max_input_len, max_bytes_per_token=12)


def read(inputs: dict) -> ClientRequest:
    request = pb.request(inputs)
    return LLM.read({tensor.name(): tensor.as_numpy() for tensor in request.inputs()}, READ_LIMITS)


def build(inputs: dict) -> Request:
    return RequestBuilder(fake_tokenizer.byte_tokenizer(), LIMITS, GenerationDefaults()).build(read(inputs), 1, "")


@pytest.fixture(scope="module")
def model_config() -> model_config_pb2.ModelConfig:
    return read_config("llm")


def read_config(model: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_the_dialects_model_lists_its_inputs(dialect: Dialect) -> None:
    inputs = read_config(dialect.name).input
    listed = [(t.name, model_config_pb2.DataType.Name(t.data_type), tuple(t.dims)) for t in inputs]
    assert listed == [(t.name, t.dtype.config_name, t.dims) for t in dialect.inputs]
    assert all(tensor.optional for tensor in inputs)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_the_dialects_model_lists_its_outputs(dialect: Dialect) -> None:
    outputs = read_config(dialect.name).output
    listed = [(t.name, model_config_pb2.DataType.Name(t.data_type), tuple(t.dims)) for t in outputs]
    assert listed == [(t.name, t.dtype.config_name, t.dims) for t in dialect.outputs]


def test_config_writes_out_every_parameter_of_the_engine(model_config) -> None:
    written = {key: value.string_value for key, value in model_config.parameters.items()}
    assert set(written) == {field.name for field in fields(EngineConfig)}
    default = EngineConfig.from_parameters({"dtype": "float32"}, "/models/llm/1")
    assert EngineConfig.from_parameters(written, "/models/llm/1") == default


def test_config_is_complete_for_a_decoupled_backend(model_config) -> None:
    assert (model_config.backend, model_config.max_batch_size) == ("inflight", 0)
    assert model_config.model_transaction_policy.decoupled
    assert [(group.kind, group.count) for group in model_config.instance_group] == [
        (model_config_pb2.ModelInstanceGroup.KIND_CPU, 1)
    ]


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_tables_name_fields_that_exist(dialect: Dialect) -> None:
    client_fields = {field.name for field in fields(ClientRequest)}
    for tensor in dialect.inputs:
        assert tensor.field in client_fields or (not tensor.field and tensor.neutral)
    for output in dialect.outputs:
        assert hasattr(Chunk(), output.value)
        assert not output.asked_by or output.asked_by in client_fields
    names = {tensor.name for tensor in dialect.inputs}
    assert len(names) == len(dialect.inputs)
    assert {name for group in dialect.required for name in group} <= names


def test_every_field_of_a_prompt_is_read() -> None:
    client = read(
        {
            "text_input": "héllo",
            "max_tokens": 7,
            "stream": True,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.75,
            "min_p": 0.25,
            "seed": 2**64 - 1,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.125,
            "min_tokens": 2,
            "num_return_sequences": 3,
            "beam_width": 4,
            "length_penalty": 0.5,
            "early_stopping": 2,
            "beam_search_diversity_rate": 0.0,
            "no_repeat_ngram_size": 3,
            "top_p_decay": 0.5,
            "top_p_min": 0.125,
            "top_p_reset_ids": 6,
            "logit_bias_ids": [1, 2],
            "logit_bias_values": [0.5, -0.25],
            "embedding_bias": [1.0, 2.0],
            "embedding_bias_words": ["a", ""],
            "embedding_bias_weights": [3.0, 4.0],
            "stop_words": ["a", "", "b"],
            "bad_words": [""],
            "end_id": 4,
            "pad_id": 5,
            "exclude_input_in_output": False,
            "return_log_probs": True,
            "num_log_probs": 4,
            "return_prompt_log_probs": True,
            "return_context_logits": True,
            "return_generation_logits": True,
            "additional_outputs": ["hidden_states"],
            "gather_context": True,
        }
    )
    assert client == ClientRequest(
        text="héllo",
        max_tokens=7,
        stream=True,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.25,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.125,
        min_tokens=2,
        num_return_sequences=3,
        beam_width=4,
        length_penalty=0.5,
        early_stopping=2,
        no_repeat_ngram_size=3,
        top_p_decay=0.5,
        top_p_min=0.125,
        top_p_reset_ids=6,
        logit_bias_ids=[1, 2],
        logit_bias_values=[0.5, -0.25],
        embedding_bias=np.array([1, 2], "<f4").tobytes(),
        embedding_bias_words=["a", ""],
        embedding_bias_weights=[3.0, 4.0],
        stop_words=["a", "b"],
        bad_words=[],
        end_id=4,
        pad_id=5,
        exclude_input_in_output=False,
        return_log_probs=True,
        num_log_probs=4,
        return_prompt_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        additional_outputs=["hidden_states"],
        gather_context=True,
    )


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_a_leading_dimension_of_one_is_harmless(shape: tuple[int, ...]) -> None:
    text = np.array([b"x"], dtype=object).reshape(shape)
    assert read({"text_input": text, "max_tokens": np.full(shape, 9, np.int32)}).max_tokens == 9


OK = {"text_input": "a", "max_tokens": 4}
BEAMS = {"beam_width": 2}


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"max_tokens": 4}, "text_input or input_ids is required"),
        ({**OK, "num_return_sequences": 0}, "num_return_sequences must be between 1 and max_batch_size 4, got 0"),
        ({**OK, "num_return_sequences": 5}, "num_return_sequences must be between 1 and max_batch_size 4, got 5"),
        ({**OK, "beam_width": 0}, "beam_width must be >= 1, got 0"),
        ({**OK, "beam_width": 5}, "beam_width must be between 1 and max_batch_size 4, got 5"),
        ({**OK, **BEAMS, "num_return_sequences": 3}, r"num_return_sequences \(3\) must not be above beam_width \(2\)"),
        ({**OK, **BEAMS, "length_penalty": 9.0}, "length_penalty must be between -8 and 8, got 9.0"),
        ({**OK, **BEAMS, "stream": True}, "a beam search cannot be streamed"),
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
        ({**OK, "beam_search_diversity_rate": 0.5}, "beam_search_diversity_rate is not supported by this model"),
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
        ({**OK, "max_tokens": 0}, "max_tokens must be between 1 and"),
        ({**OK, "max_tokens": -1}, "max_tokens must be between 1 and"),
        ({**OK, "max_tokens": 2**31 - 1}, "max_tokens must be between 1 and"),
        ({**OK, "temperature": float("nan")}, "temperature must be a finite number, got nan"),
        ({**OK, "temperature": float("inf")}, "temperature must be a finite number, got inf"),
        ({**OK, "temperature": -1.0}, "temperature must be"),
        ({**OK, "top_p": 1.5}, "top_p must be"),
        ({**OK, "top_p": float("nan")}, "top_p must be a finite number"),
        ({**OK, "top_k": -1}, "top_k must be"),
        ({**OK, "min_p": 2.0}, "min_p must be"),
        ({**OK, "repetition_penalty": 0.0}, "repetition_penalty must be"),
        ({**OK, "min_tokens": -1}, "min_tokens must be"),
        ({**OK, "min_tokens": 5}, "min_tokens .5. must not be above max_tokens .4."),
        ({"input_ids": [1, 300], "max_tokens": 4}, "token id 300 is outside the vocabulary"),
        ({"input_ids": [-1], "max_tokens": 4}, "token id -1 is outside the vocabulary"),
        ({**OK, "end_id": 300}, "end_id must be -1"),
        ({**OK, "end_id": -2}, "end_id must be -1"),
        ({**OK, "pad_id": 300}, "pad_id must be -1"),
        ({**OK, "stop_words": ["x"] * 100_000}, "stop_words has 100000 entries, more than 1024"),
        ({**OK, "stop_words": ["x" * 10_000_000]}, "stop_words holds 10000000 bytes, more than"),
        ({**OK, "stop_words": [b"\xc3"]}, "stop_words is not valid UTF-8"),
        ({**OK, "bad_words": ["x"] * 1025}, "bad_words has 1025 entries"),
        ({**OK, "no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be between 0"),
        ({**OK, "no_repeat_ngram_size": 65}, "no_repeat_ngram_size must be between 0"),
        ({**OK, "top_p_decay": 0.0}, "top_p_decay must be above 0"),
        ({**OK, "top_p_decay": 1.5}, "top_p_decay must be above 0"),
        ({**OK, "top_p_min": 0.0}, "top_p_min must be above 0"),
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
        ({**OK, "unheard_of": 1}, "an input tensor that this model does not have"),
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


@pytest.mark.parametrize("given_values", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
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


def test_parameters_beside_the_tensors() -> None:
    assert read_parameters('{"priority": 7, "Streaming": true, "triton_x": 1, "other": [1]}') == {}
    assert read_parameters('{"timeout": 2500}') == {"allotted_time_ms": 3}
    assert read_parameters('{"request_priority": "0.25", "cache_salt": "me"}') == {"priority": 0.25, "cache_salt": "me"}
    assert read_parameters("{}", timeout_us=1500) == {"allotted_time_ms": 2}
    assert read_parameters('{"allotted_time_ms": 7}', timeout_us=1500) == {"allotted_time_ms": 7}


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        "[" * 200_000,
        '{"request_priority": 2}',
        '{"request_priority": NaN}',
        '{"timeout": -1}',
        '{"allotted_time_ms": "x"}',
        '{"allotted_time_ms": -1}',
        '{"cache_salt": 7}',
        '{"cache_salt": "%s"}' % ("x" * 300),
    ],
)
def test_wrong_parameters_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_parameters(text)


def test_a_table_alone_makes_another_dialect() -> None:
    """Batch dimension, token word lists, values refused unless neutral, ignored tensors, other finish words."""
    inner = Dialect(
        name="inner",
        batched=True,
        unfinished="None",
        required=(("input_ids",), ("request_output_len",)),
        inputs=(
            LLM.inputs_by_name["input_ids"],
            InputTensor(name="request_output_len", dtype=TensorType.INT32, dims=(1,), field="max_tokens"),
            InputTensor(
                name="stop_words_list", dtype=TensorType.INT32, dims=(2, -1), field="stop_word_ids", read=read_word_ids
            ),
            InputTensor(name="beam_width", dtype=TensorType.INT32, dims=(1,), neutral=(1,)),
            InputTensor(name="skipped", dtype=TensorType.FP32, dims=(1,), neutral=None),
        ),
        outputs=(OutputTensor(name="output_ids", dtype=TensorType.INT32, dims=(-1, -1), value="token_ids"),),
    )
    given_arrays = {
        "input_ids": np.array([[5, 6]], np.int32),
        "request_output_len": np.array([[3]], np.int32),
        "stop_words_list": np.array([[[7, 8, 9, 0], [2, 3, -1, -1]]], np.int32),
        "beam_width": np.array([[1]], np.int32),
        "skipped": np.array([[np.nan]], np.float32),
    }
    client = inner.read(given_arrays, READ_LIMITS)
    assert (client.input_ids, client.max_tokens, client.stop_word_ids) == ([5, 6], 3, [[7, 8], [9]])
    with pytest.raises(InvalidRequest, match="beam_width is not supported"):
        inner.read({**given_arrays, "beam_width": np.array([[2]], np.int32)}, READ_LIMITS)
    assert inner.write(Chunk(token_ids=[1, 2]), client, None)["output_ids"].tolist() == [[[1, 2]]]


@pytest.mark.parametrize(
    "array",
    [[[1, 2]], [[1, 2], [3, -1]], [[1, 2], [2, 1]], [[1, 2], [0, -1]]],
    ids=["one row", "far", "falling", "zero"],
)
def test_wrong_word_offsets_are_refused(array: list) -> None:
    with pytest.raises(InvalidRequest):
        read_word_ids("stop_words_list", np.array(array, np.int32), READ_LIMITS)


def test_outputs_have_the_shapes_and_types_of_the_table() -> None:
    client = ClientRequest(
        return_log_probs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        num_log_probs=3,
        return_prompt_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        additional_outputs=["hidden_states"],
        gather_context=True,
        num_return_sequences=3,
    )
    plain = Chunk(
        sequence_index=2, text="é", token_ids=[1, 2], log_probs=[-1.0, -2.0], cum_log_prob=-3.0, finish_reason="stop"
    )
    chunk = replace(
        plain,
        top_token_ids=np.zeros((2, 3), np.int32),
        top_log_probs=np.zeros((2, 3), np.float32),
        prompt_log_probs=np.zeros(4, np.float32),
        prompt_top_token_ids=np.zeros((4, 3), np.int32),
        prompt_top_log_probs=np.zeros((4, 3), np.float32),
        context_logits=np.zeros((5, 300), np.float32),
        generation_logits=np.zeros((2, 300), np.float32),
        hidden_states=np.zeros((2, 8), np.float32),
        context_hidden_states=np.zeros((5, 8), np.float32),
    )
    written = LLM.write(chunk, client, None)
    assert {name: array.shape for name, array in written.items()} == {
        "text_output": (1,),
        "output_ids": (1, 2),
        "sequence_length": (1,),
        "finish_reason": (1,),
        "sequence_index": (1,),
        "cum_log_probs": (1,),
        "output_log_probs": (1, 2),
        "top_token_ids": (1, 2, 3),
        "top_log_probs": (1, 2, 3),
        "prompt_log_probs": (4,),
        "prompt_top_token_ids": (4, 3),
        "prompt_top_log_probs": (4, 3),
        "context_logits": (5, 300),
        "generation_logits": (1, 2, 300),
        "hidden_states": (1, 2, 8),
        "context_hidden_states": (5, 8),
        "num_input_tokens": (1,),
        "num_output_tokens": (1,),
    }
    for output in LLM.outputs:
        assert written[output.name].dtype == output.dtype.numpy_type
    assert written["text_output"][0] == "é".encode() and written["sequence_index"][0] == 2
    assert set(LLM.write(chunk, ClientRequest(), None)) == {
        "text_output",
        "output_ids",
        "sequence_length",
        "finish_reason",
    }
    assert set(LLM.write(chunk, client, frozenset({"text_output"}))) == {"text_output"}
    assert set(LLM.write(plain, client, None)) == {
        "text_output",
        "output_ids",
        "sequence_length",
        "finish_reason",
        "sequence_index",
        "cum_log_probs",
        "output_log_probs",
        "num_input_tokens",
        "num_output_tokens",
    }, "a later chunk of a stream has nothing of the prompt"


@given(st.text(max_size=400))
def test_echoed_text_is_short_and_printable(text: str) -> None:
    shown = safe_text(text)
    assert shown.isprintable() and len(shown.encode("utf-8", "replace")) <= 256


def test_a_forged_log_line_is_escaped() -> None:
    assert safe_text("\n[ERROR] fake\x1b[31m") == "\\n[ERROR] fake\\x1b[31m"
