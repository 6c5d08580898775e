"""The folder `backend/apis`: its models, and on its page what they do with each tensor, from the code's own tables.

`python -m ci.dialect_models` brings it up to date, and `ci/unit/house/test_pages.py` fails where it is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "backend"))

from ci.page_part import with_part  # noqa: E402
from inflight.metric_families import FAMILIES  # noqa: E402
from inflight.server.tensors.dialect import Dialect, InputTensor, OutputTensor  # noqa: E402
from inflight.server.tensors.dialects import (  # noqa: E402
    EMBEDDING,
    ENSEMBLE,
    LLM,
    LLMAPI,
    POSTPROCESSING,
    PREPROCESSING,
    RERANK,
    TENSORRT_LLM,
    TENSORRT_LLM_BLS,
    VLLM_MODEL,
)
from inflight.server.tensors.entries import NO_MEDIA  # noqa: E402
from inflight.server.tensors.request_parameters import REQUEST_TYPE, REQUEST_TYPE_OF_MODELS, REQUEST_TYPES  # noqa: E402
from inflight.server.tensors.sampling_parameters import PARAMETERS, Parameter  # noqa: E402
from inflight.server.threads.vllm_metrics import vllm_families  # noqa: E402

APIS = ROOT / "backend" / "apis"
MODELS = {
    "tensorrtllm": {
        each.name: each for each in (TENSORRT_LLM, ENSEMBLE, TENSORRT_LLM_BLS, PREPROCESSING, POSTPROCESSING)
    },
    "llmapi": {"tensorrt_llm": LLMAPI},
    "vllm": {VLLM_MODEL.name: VLLM_MODEL},
    "unary": {"llm_unary": LLM},
    "embedding": {each.name: each for each in (EMBEDDING, RERANK)},
}
"""API -> its models and their dialects."""
UNARY = ("unary", "embedding", PREPROCESSING.name, POSTPROCESSING.name)
"""APIs and models that are not decoupled: one response to each request."""
WORDS = {
    "has_several_sequences": "`num_return_sequences` is above 1",
    "is_one_of_several": "the request has several prompts",
}
"""What switches an output on, where it is not the field of that name."""
SENT = {"nothing": "never: " + NO_MEDIA, "prompt_table_extra_ids": "if `PROMPT_TABLE_EXTRA_ID` is given"}
"""When an output is sent that nothing switches on, by its value, where it is not always."""
REQUEST_PARAMETERS = [
    ["those of `sampling_parameters`", "honoured by `vllm_model` if the tensor is not given"],
    [
        "`timeout`; of ours `request_priority`, `allotted_time_ms`, `cache_salt`",
        "honoured by each model that generates, by `embedding` and by `rerank`",
    ],
    [
        f"`{REQUEST_TYPE}`, from other models `{REQUEST_TYPE_OF_MODELS}`: {', '.join(REQUEST_TYPES)}",
        "honoured by each model that generates; context_only by those with the output `context_phase_params`",
    ],
    [
        "`dimensions`, `truncate`, `prompt_name`, `input_type`, `embedding_type`",
        "honoured by `embedding`, and `truncate` by `rerank`, as the tensors; `embedding_type` refused unless it is "
        "float",
    ],
    ["`Streaming` and all others", "ignored, as there"],
]
NO_METRICS = {
    "nv_trt_llm_v1_metrics": "this engine has no V1 batching",
    "nv_trt_llm_disaggregated_serving_metrics": "this engine does not measure transfers of contexts",
}
PAGE = APIS / "README.md"
BEGIN, END = "<!-- tables: made by python -m ci.dialect_models -->\n", "<!-- /tables -->\n"


def made_files() -> dict[Path, str]:
    """Everything below `backend/apis`: the page with its tables, each config.pbtxt, and the file that keeps its version
    folder."""
    files = {PAGE: with_tables(PAGE.read_text(encoding="utf-8"))}
    for api, models in MODELS.items():
        for name, dialect in models.items():
            folder = APIS / api / name
            files[folder / "config.pbtxt"] = config(name, dialect, decoupled=not {api, name} & set(UNARY))
            files[folder / "1" / ".gitkeep"] = ""
    return files


def config(name: str, dialect: Dialect, *, decoupled: bool) -> str:
    """A complete config.pbtxt."""
    lines = [
        "# Made by python -m ci.dialect_models. The dialect's table says what each tensor means.",
        f'name: "{name}"',
        'backend: "inflight"',
        f"max_batch_size: {dialect.max_prompts if dialect.batched else 0}",
        f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}",
        "instance_group [ { kind: KIND_CPU count: 1 } ]",
        "",
        "# The backend checks which are needed, so all are optional here.",
        *_tensors("input", dialect.inputs, " optional: true"),
        *_tensors("output", dialect.outputs, ""),
        "# The model whose engine serves this one too.",
        'parameters { key: "engine" value { string_value: "llm" } }',
        "# What the tensors mean; a model may have another name than its dialect.",
        f'parameters {{ key: "dialect" value {{ string_value: "{dialect.name}" }} }}',
    ]
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """The page with the tables as they are now. Raises ValueError if it has no place for them."""
    return with_part(page, BEGIN, END, tables())


def _tensors(kind: str, tensors: tuple[InputTensor | OutputTensor, ...], more: str) -> list[str]:
    lines = [
        f'  {{ name: "{tensor.name}" data_type: {tensor.dtype.config_name} dims: {list(tensor.dims)}{more} }}'
        for tensor in tensors
    ]
    return [f"{kind} [", *(f"{line}," for line in lines[:-1]), lines[-1], "]"]


def tables() -> str:
    """Markdown: what becomes of each tensor of the neighbours' models, and of each of vLLM's sampling parameters."""
    return "\n".join(
        [
            *_table(f"input of `{TENSORRT_LLM.name}`", map(_input, TENSORRT_LLM.inputs)),
            *_table(f"input of `{ENSEMBLE.name}` and `{TENSORRT_LLM_BLS.name}`", map(_input, TENSORRT_LLM_BLS.inputs)),
            *_table(f"input of `{PREPROCESSING.name}`", map(_input, PREPROCESSING.inputs)),
            *_table(f"input of `{POSTPROCESSING.name}`", map(_input, POSTPROCESSING.inputs)),
            *_table("input of llmapi's `tensorrt_llm`", map(_input, LLMAPI.inputs)),
            *_table(f"input of `{VLLM_MODEL.name}`", map(_input, VLLM_MODEL.inputs)),
            *_table("input of `embedding`", map(_input, EMBEDDING.inputs)),
            *_table("input of `rerank`", map(_input, RERANK.inputs)),
            *_table("key of `sampling_parameters`", map(_parameter, PARAMETERS)),
            *_table("output", _outputs()),
            *_table("request parameter", iter(REQUEST_PARAMETERS)),
            *_table("metric", _metrics()),
        ]
    )


def _table(head: str, rows: Iterator[list[str]]) -> list[str]:
    return [f"| {head} | |", "| --- | --- |", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _input(tensor: InputTensor) -> list[str]:
    what = f"`{tensor.name}` {tensor.dtype.name} {list(tensor.dims)}"
    if tensor.is_refused:
        return [what, _refused(tensor.reason, tensor.neutral)]
    if tensor.fills is not None:
        return [what, "honoured"]
    if not tensor.field:
        return [what, f"ignored: {tensor.reason}"]
    return [what, "honoured" + (f" as `{tensor.field}`" if tensor.field != tensor.name else "")]


def _parameter(parameter: Parameter) -> list[str]:
    what = f"`{parameter.name}`"
    if parameter.set is not None:
        same = parameter.field == parameter.name
        return [what, "honoured" + ("" if same else " as " + ", ".join(f"`{f}`" for f in parameter.field.split(", ")))]
    if parameter.neutral is None:
        return [what, f"ignored, as there: {parameter.reason}"]
    return [what, _refused(parameter.reason, parameter.neutral)]


def _refused(reason: str, neutral: tuple[object, ...] | None) -> str:
    spared = [str(value).lower() for value in neutral or () if value != b""]
    return f"refused unless it is {' or '.join(['empty', *spared])}: {reason}"


def _outputs() -> Iterator[list[str]]:
    models = (
        ("`tensorrt_llm`", TENSORRT_LLM),
        ("`ensemble`", ENSEMBLE),
        ("`preprocessing`", PREPROCESSING),
        ("`postprocessing`", POSTPROCESSING),
        ("llmapi", LLMAPI),
        ("`vllm_model`", VLLM_MODEL),
        ("`embedding`", EMBEDDING),
        ("`rerank`", RERANK),
    )
    told: list[OutputTensor] = []
    for _, dialect in models:
        for tensor in dialect.outputs:
            if tensor not in told:
                told.append(tensor)
                of = " and ".join(name for name, each in models if tensor in each.outputs)
                flag = WORDS.get(tensor.asked_by, f"`{tensor.asked_by}`")
                when = f"if {flag} or by its name" if tensor.asked_by else SENT.get(tensor.value, "always")
                yield [f"`{tensor.name}` {tensor.dtype.name} {list(tensor.dims)} of {of}", when]


def _metrics() -> Iterator[list[str]]:
    for family in FAMILIES:
        if family.name.startswith(("nv_trt_llm_", "nv_llm_")):
            yield [
                f"`{family.name}` by `{family.label}`: {', '.join(family.series)}",
                "as there, of each model that generates",
            ]
    for families in vllm_families(1).values():
        yield from ([f"`{family.name}`", f"as there, of `{VLLM_MODEL.name}`"] for family in families)
    yield from ([f"`{name}`", f"not there: {reason}"] for name, reason in NO_METRICS.items())


if __name__ == "__main__":
    for path, text in made_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
