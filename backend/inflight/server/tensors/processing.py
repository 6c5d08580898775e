"""The dialects of tensorrtllm_backend's `preprocessing` and `postprocessing`: text to tokens, and tokens to text.

Ensembles and clients that put these models around `tensorrt_llm` find the names that they know. An output of
`preprocessing` is an attribute of Preprocessed, one of `postprocessing` of Chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import InvalidRequest
from inflight.server.tensors.dialect import Dialect, InputTensor, OutputTensor, TensorType
from inflight.server.tensors.entries import NO_ENCODER, NO_MEDIA, output, refused, row, scalar, single
from inflight.server.tensors.tensor_values import (
    Array,
    ReadLimits,
    Value,
    read_numbers,
    read_prompt,
    read_prompt_ids,
    read_texts,
    read_words,
)

MAX_DECODED_TOKENS = 2**20
"""Tokens of one prompt's sequences that are turned into text at once, which takes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessed:
    """What `preprocessing` makes of one prompt. Rows are padded to those of the request's other prompts."""

    input_ids: list[int]
    """Padded with `pad_id`."""
    input_length: int
    bad_words: Array
    """[2, n] int32: the tokens of all words, and the end offset of each, padded with -1. n is 0 without the tensor."""
    stop_words: Array
    embedding_bias: Array
    """[vocabulary] float32, or empty."""
    max_tokens: int
    end_id: int
    pad_id: int
    prompt_table_extra_ids: list[int] | None = None
    """One for each of `input_ids`; None = the request names none."""
    decoder_input_length: int = 1
    """Of a network without an encoder too: its decoder's input is one padding token."""
    nothing: None = None
    """The value of outputs that are never sent."""


def read_sequences(name: str, array: Array, limits: ReadLimits) -> Value:
    """Rows of token ids, shape [sequences, n] or [1, sequences, n]."""
    if array.ndim < 2 or (array.ndim > 2 and len(array) != 1):
        raise InvalidRequest(f"{name} must have shape [sequences, tokens], got {list(array.shape)}")
    if array.size > MAX_DECODED_TOKENS:
        raise InvalidRequest(f"{name} has {array.size} tokens, more than {MAX_DECODED_TOKENS}")
    rows: list[list[int]] = array.reshape(array.shape[-2:]).tolist()
    return rows


def _vision(name: str, dtype: TensorType, *dims: int) -> OutputTensor:
    return OutputTensor(name=name, dtype=dtype, dims=dims, value="nothing")


PREPROCESSING = Dialect(
    name="preprocessing",
    batched=True,
    required=(("QUERY",), ("REQUEST_OUTPUT_LEN",)),
    inputs=(
        InputTensor(name="QUERY", dtype=TensorType.STRING, dims=(1,), field="text", read=read_prompt),
        refused("DECODER_QUERY", TensorType.STRING, 1, NO_ENCODER, b""),
        refused("IMAGE_BYTES", TensorType.UINT8, 4, NO_MEDIA),
        refused("IMAGE_URL", TensorType.STRING, 1, NO_MEDIA, b""),
        refused("IMAGES", TensorType.STRING, 1, NO_MEDIA, b""),
        refused("VIDEO_BYTES", TensorType.UINT8, 4, NO_MEDIA),
        scalar("REQUEST_OUTPUT_LEN", TensorType.INT32, "max_tokens"),
        row("BAD_WORDS_DICT", TensorType.STRING, read_words, "bad_words"),
        row("STOP_WORDS_DICT", TensorType.STRING, read_words, "stop_words"),
        row("EMBEDDING_BIAS_WORDS", TensorType.STRING, read_texts, "embedding_bias_words"),
        row("EMBEDDING_BIAS_WEIGHTS", TensorType.FP32, read_numbers, "embedding_bias_weights"),
        scalar("END_ID", TensorType.INT32, "end_id"),
        scalar("PAD_ID", TensorType.INT32, "pad_id"),
        InputTensor(
            name="PROMPT_TABLE_EXTRA_ID",
            dtype=TensorType.UINT64,
            dims=(1,),
            field="prompt_table_extra_ids",
            read=read_prompt_ids,
        ),
    ),
    outputs=(
        output("INPUT_ID", TensorType.INT32, 1, "input_ids"),
        single("REQUEST_INPUT_LEN", TensorType.INT32, "", "input_length"),
        output("DECODER_INPUT_ID", TensorType.INT32, 1, "pad_id"),
        single("REQUEST_DECODER_INPUT_LEN", TensorType.INT32, "", "decoder_input_length"),
        OutputTensor(name="BAD_WORDS_IDS", dtype=TensorType.INT32, dims=(2, -1), value="bad_words"),
        OutputTensor(name="STOP_WORDS_IDS", dtype=TensorType.INT32, dims=(2, -1), value="stop_words"),
        output("EMBEDDING_BIAS", TensorType.FP32, 1, "embedding_bias"),
        output("REQUEST_OUTPUT_LEN", TensorType.INT32, 1, "max_tokens"),
        single("OUT_END_ID", TensorType.INT32, "", "end_id"),
        single("OUT_PAD_ID", TensorType.INT32, "", "pad_id"),
        output("OUT_PROMPT_TABLE_EXTRA_IDS", TensorType.UINT64, 1, "prompt_table_extra_ids"),
        _vision("PIXEL_VALUES", TensorType.FP16, -1, -1, -1, -1),
        _vision("ASPECT_RATIO_IDS", TensorType.INT64, -1),
        _vision("ASPECT_RATIO_MASK", TensorType.INT64, -1, -1),
        _vision("CROSS_ATTENTION_MASK", TensorType.INT64, -1, -1, -1),
        _vision("IMAGE_SIZES", TensorType.INT64, -1, 2),
        _vision("IS_VIDEO_INPUT", TensorType.BOOL, 1),
        _vision("ATTENTION_MASK", TensorType.INT64, -1),
        _vision("IMAGE_GRID_THW", TensorType.INT64, 3),
        _vision("VISION_INPUT_ID", TensorType.INT32, -1),
    ),
)

POSTPROCESSING = Dialect(
    name="postprocessing",
    batched=True,
    required=(("TOKENS_BATCH",), ("SEQUENCE_LENGTH",)),
    inputs=(
        InputTensor(name="TOKENS_BATCH", dtype=TensorType.INT32, dims=(-1, -1), field="sequences", read=read_sequences),
        row("SEQUENCE_LENGTH", TensorType.INT32, read_numbers, "sequence_lengths"),
    ),
    # The texts of all prompts one below the other, without a dimension for the batch.
    outputs=(OutputTensor(name="OUTPUT", dtype=TensorType.STRING, dims=(-1,), value="text", wire_rank=1),),
)
