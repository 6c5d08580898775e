"""The dialect of vllm_backend: text, and sampling parameters as a JSON object. No batch dimension."""

from __future__ import annotations

from inflight.errors import InvalidRequest
from inflight.server.tensors.dialect import Default, Dialect, Gathering, InputTensor, OutputTensor, TensorType
from inflight.server.tensors.entries import GUIDE_NOT_ENFORCED, output, refused, row, scalar, single
from inflight.server.tensors.sampling_parameters import read_options, read_sampling_parameters
from inflight.server.tensors.tensor_values import Array, ReadLimits, read_images, read_prompt, read_scalar

DEFAULTS = (
    Default(field="max_tokens", value=16),
    Default(field="temperature", value=1.0),
    Default(field="top_p", value=1.0),
    Default(field="top_k", value=0),
    Default(field="min_p", value=0.0),
    Default(field="typical_p", value=1.0),
    Default(field="repetition_penalty", value=1.0),
    Default(field="no_repeat_ngram_size", value=0),
    Default(field="min_tokens", value=0),
)
"""Those of vLLM's SamplingParams, which vllm_backend makes without the checkpoint's generation_config.json."""


def _switch(name: str, *fields: str) -> InputTensor:
    """Sets all `fields` if it is true, and none if it is false."""

    def fill(name: str, array: Array, limits: ReadLimits) -> dict[str, bool]:
        return dict.fromkeys(fields, True) if read_scalar(name, array, limits) else {}

    return InputTensor(name=name, dtype=TensorType.BOOL, dims=(1,), fills=fill)


VLLM_MODEL = Dialect(
    name="vllm_model",
    unfinished="None",
    gathering=Gathering.ALL,
    required=(("text_input",),),
    defaults=DEFAULTS,
    no_echo_in_streams=("Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."),
    uncoded=frozenset({InvalidRequest.code}),
    cancellation_log=("[vllm] Cancelling the request", "[vllm] Successfully cancelled the request"),
    has_vllm_metrics=True,
    parameters_as="sampling_parameters",
    read_parameters=read_options,
    inputs=(
        InputTensor(name="text_input", dtype=TensorType.STRING, dims=(1,), field="text", read=read_prompt),
        row("image", TensorType.STRING, read_images, "images"),
        scalar("stream", TensorType.BOOL),
        InputTensor(name="sampling_parameters", dtype=TensorType.STRING, dims=(1,), fills=read_sampling_parameters),
        scalar("exclude_input_in_output", TensorType.BOOL),
        scalar("return_finish_reason", TensorType.BOOL),
        _switch("return_cumulative_logprob", "return_cumulative_logprob", "return_log_probs"),
        scalar("return_logprobs", TensorType.BOOL),
        scalar("return_num_input_tokens", TensorType.BOOL),
        scalar("return_num_output_tokens", TensorType.BOOL),
        refused("embedding_request", TensorType.STRING, 1, "this model generates text", b""),
    ),
    outputs=(
        output("text_output", TensorType.STRING, 1, "text"),
        output("finish_reason", TensorType.STRING, 1, "finish_reason", "return_finish_reason"),
        OutputTensor(
            name="cumulative_logprob",
            dtype=TensorType.FP32,
            dims=(-1,),
            value="cum_log_prob",
            asked_by="return_cumulative_logprob",
            by_name={"return_log_probs": True},
        ),
        output("logprobs", TensorType.STRING, 1, "log_probs_json", "return_logprobs"),
        single("num_input_tokens", TensorType.UINT32, "return_num_input_tokens"),
        output("num_output_tokens", TensorType.UINT32, 1, "num_output_tokens", "return_num_output_tokens"),
        GUIDE_NOT_ENFORCED,
    ),
)
