"""What tensors mean: the tables of the dialects, and config.pbtxt beside them."""

from __future__ import annotations

from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from llm_tensors import READ_LIMITS, read
from tritonclient.grpc import model_config_pb2

from inflight.config import EngineConfig
from inflight.context_phase import RequestType
from inflight.errors import InvalidRequest
from inflight.prompt_tuning import EmbeddingTable
from inflight.result import PerfMetrics
from inflight.server.tensors.chunk import Chunk
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import Dialect, InputTensor, OutputTensor, TensorType
from inflight.server.tensors.dialects import DIALECTS, LLM
from inflight.server.tensors.pooled import EMBEDDING, RERANK, Embedded, Ranked
from inflight.server.tensors.processing import PREPROCESSING, Preprocessed
from inflight.server.tensors.tensor_values import read_word_ids

REPOSITORY = Path(__file__).parents[3] / "model_repository"


@pytest.fixture(scope="module")
def model_config() -> model_config_pb2.ModelConfig:
    return read_config("llm")


def read_config(model: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


MODELS = {
    str(path.parent.relative_to(REPOSITORY.parent)): path
    for folder in (REPOSITORY, REPOSITORY.parent / "backend" / "apis")
    for path in folder.rglob("config.pbtxt")
}


def dialect_of(config: model_config_pb2.ModelConfig) -> str:
    return config.parameters["dialect"].string_value or config.name


@pytest.mark.parametrize("model", MODELS)
def test_a_model_lists_the_tensors_of_its_dialect(model: str) -> None:
    config = text_format.Parse(MODELS[model].read_text(), model_config_pb2.ModelConfig())
    name = dialect_of(config)
    for tensors, table in ((config.input, DIALECTS[name].inputs), (config.output, DIALECTS[name].outputs)):
        listed = [(t.name, model_config_pb2.DataType.Name(t.data_type), tuple(t.dims)) for t in tensors]
        assert listed == [(t.name, t.dtype.config_name, t.dims) for t in table]
    assert all(tensor.optional for tensor in config.input)
    assert config.max_batch_size == DIALECTS[name].max_prompts * DIALECTS[name].batched and config.backend == "inflight"


def test_every_dialect_has_a_model() -> None:
    configs = [text_format.Parse(path.read_text(), model_config_pb2.ModelConfig()) for path in MODELS.values()]
    assert set(DIALECTS) == {dialect_of(config) for config in configs}


def test_config_writes_out_every_parameter_of_the_engine(model_config) -> None:
    written = {key: value.string_value for key, value in model_config.parameters.items()}
    assert set(written) == {field.name for field in fields(EngineConfig)}
    of_default_model = {"dtype": "float32", "max_loras": "4", "lora_dir": "adapters"}
    default = EngineConfig.from_parameters(of_default_model, "/models/llm/1")
    assert EngineConfig.from_parameters(written, "/models/llm/1") == default


def test_config_is_complete_for_a_decoupled_backend(model_config) -> None:
    assert (model_config.backend, model_config.max_batch_size) == ("inflight", 0)
    assert model_config.model_transaction_policy.decoupled
    assert [(group.kind, group.count) for group in model_config.instance_group] == [
        (model_config_pb2.ModelInstanceGroup.KIND_CPU, 1)
    ]


OF_OTHERS = {PREPROCESSING.name: Preprocessed, EMBEDDING.name: Embedded, RERANK.name: Ranked}
"""What outputs are attributes of, where it is no Chunk."""


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_tables_name_fields_that_exist(dialect: Dialect) -> None:
    client_fields = {field.name for field in fields(ClientRequest)}
    for tensor in dialect.inputs:
        assert tensor.field in client_fields or not tensor.field
        assert tensor.field or tensor.fills or tensor.reason, "what is refused or ignored has a reason"
    source = OF_OTHERS.get(dialect.name) or Chunk(perf_metrics=PerfMetrics())
    for output in dialect.outputs:
        assert attrgetter(output.value)(source) is not output
        assert not output.asked_by or hasattr(ClientRequest(), output.asked_by)
        assert output.fields_by_name.keys() <= client_fields
    for default in dialect.defaults:
        assert {default.field, *default.unless, default.like or default.field} <= client_fields
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
            "typical_p": 0.375,
            "seed": 2**64 - 1,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.125,
            "min_tokens": 2,
            "num_return_sequences": 3,
            "beam_width": 4,
            "length_penalty": 0.5,
            "early_stopping": 2,
            "beam_width_array": [2, 4],
            "beam_search_diversity_rate": 0.25,
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
            "prompt_embedding_table": np.array([[1, 2]], np.float16),
            "prompt_vocab_size": 1,
            "prompt_table_extra_ids": np.array([2**64 - 1], np.uint64),
            "lora_name": "pirate",
            "lora_task_id": 2**64 - 1,
            "lora_order": "load",
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
        typical_p=0.375,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.125,
        min_tokens=2,
        num_return_sequences=3,
        beam_width=4,
        length_penalty=0.5,
        beam_width_array=[2, 4],
        beam_search_diversity_rate=0.25,
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
        prompt_embedding_table=EmbeddingTable.of(np.array([[1, 2]], np.float16)),
        prompt_vocab_size=1,
        prompt_table_extra_ids=[2**64 - 1],
        lora_name="pirate",
        lora_task_id=2**64 - 1,
        lora_order="load",
    )


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_a_leading_dimension_of_one_is_harmless(shape: tuple[int, ...]) -> None:
    text = np.array([b"x"], dtype=object).reshape(shape)
    assert read({"text_input": text, "max_tokens": np.full(shape, 9, np.int32)}).max_tokens == 9


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
    assert inner.write([Chunk(token_ids=[1, 2])], client, None)["output_ids"].tolist() == [[[1, 2]]]


@pytest.mark.parametrize(
    "array",
    [[[1, 2]], [[1, 2], [3, -1]], [[1, 2], [2, 1]], [[1, 2], [0, -1]], [[1] * 40_000, [-1] * 40_000]],
    ids=["one row", "far", "falling", "zero", "long"],
)
def test_wrong_word_offsets_are_refused(array: list) -> None:
    with pytest.raises(InvalidRequest):
        read_word_ids("stop_words_list", np.array(array, np.int32), READ_LIMITS)


PERF_METRICS = (
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "kv_cache_alloc_total_blocks",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)


def test_outputs_have_the_shapes_and_types_of_the_table() -> None:
    client = ClientRequest(
        return_log_probs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_perf_metrics=True,
        num_log_probs=3,
        return_prompt_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        additional_outputs=["hidden_states"],
        gather_context=True,
        num_return_sequences=3,
        guide_is_strict=False,
        return_resume_token=True,
        request_type=RequestType.CONTEXT_ONLY,
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
        guide_not_enforced=["#/a not", "# pattern"],
        resume_token="ab.",
        context_phase_params=np.zeros(90, np.uint8),
        perf_metrics=PerfMetrics(arrival_time_ns=2**40, total_draft_tokens=4, total_accepted_draft_tokens=3),
    )
    written = LLM.write([chunk], client, None)
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
        "guided_decoding_not_enforced": (2,),
        "resume_token": (1,),
        "context_phase_params": (90,),
        **dict.fromkeys(PERF_METRICS, (1,)),
    }
    assert written["arrival_time_ns"] == [2**40] and written["acceptance_rate"] == [0.75]
    for output in LLM.outputs:
        assert written[output.name].dtype == output.dtype.numpy_type
    assert written["text_output"][0] == "é".encode() and written["sequence_index"][0] == 2
    assert set(LLM.write([chunk], ClientRequest(), None)) == {
        "text_output",
        "output_ids",
        "sequence_length",
        "finish_reason",
    }
    assert set(LLM.write([chunk], client, frozenset({"text_output"}))) == {"text_output"}
    assert set(LLM.write([plain], client, None)) == {
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
