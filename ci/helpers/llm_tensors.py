"""Reads tensors of the model llm as the server does, and builds requests from them, with small limits."""

from __future__ import annotations

import fake_pb_utils as pb
import fake_tokenizer

from inflight.generation_defaults import GenerationDefaults
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.server.request_builder import RequestBuilder
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialects import LLM
from inflight.server.tensors.tensor_values import ReadLimits

LIMITS = RequestLimits(
    vocab_size=300, max_seq_len=64, max_input_len=63, kv_cache_tokens=1000, max_batch_size=4, embedding_size=2
)
READ_LIMITS = ReadLimits(
    max_text_bytes=1000, max_input_len=LIMITS.max_input_len, vocab_size=LIMITS.vocab_size, max_bytes_per_token=12
)


def read(inputs: dict) -> ClientRequest:
    request = pb.request(inputs)
    return LLM.read({tensor.name(): tensor.as_numpy() for tensor in request.inputs()}, READ_LIMITS)


def build(inputs: dict) -> Request:
    return build_asked(read(inputs))


def build_asked(client: ClientRequest) -> Request:
    return RequestBuilder(fake_tokenizer.byte_tokenizer(), LIMITS, GenerationDefaults()).build(client, 1, "")


OK = {"text_input": "a", "max_tokens": 4}
BEAMS = {"beam_width": 2}
