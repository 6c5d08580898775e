"""The table of weights in `backend/inflight/models/README.md`: which format runs where, found out by trying it.

    python -m ci.format_table             says what differs
    python -m ci.format_table --write     brings the page up to date

A tiny checkpoint of each format, dense and with experts, computes a step in C++, by every set of instructions that this
machine has, and in torch, and is loaded on a fake GPU. A cell says what the layers then hold.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "ci" / "helpers"))

from coded_checkpoints import KINDS, SHAPE, write_coded_checkpoint  # noqa: E402
from compiled_network import Network, Step, config_of  # noqa: E402
from fake_cuda.context import fake_cuda  # noqa: E402
from fake_cuda.device import CUDA  # noqa: E402
from gguf import GGMLQuantizationType  # noqa: E402
from gguf_files import write_model  # noqa: E402
from tiny_checkpoints import TinyCheckpoint, write_checkpoint  # noqa: E402
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig  # noqa: E402

from ci.page_part import renew, with_part  # noqa: E402
from inflight.distributed.rank_group import SingleRank  # noqa: E402
from inflight.distributed.tensor_parallel import TensorParallelGroup  # noqa: E402
from inflight.errors import ConfigurationError  # noqa: E402
from inflight.gguf import folder as gguf_folder  # noqa: E402
from inflight.gguf.tensor_types import NOT_READ, TENSOR_TYPES  # noqa: E402
from inflight.layers.experts import Experts  # noqa: E402
from inflight.layers.weight import CodedGroups, DenseWeight, Fp8BlockWeight, Fp8Weight, Int4Groups  # noqa: E402
from inflight.models.checkpoint import Checkpoint  # noqa: E402
from inflight.models.compiled import CompiledNetwork  # noqa: E402
from inflight.models.decoder_loading import load_decoder  # noqa: E402
from inflight.models.formats.coded import CodedFormat  # noqa: E402
from inflight.models.formats.format import Block, Target, WeightFormat  # noqa: E402
from inflight.models.gguf_checkpoint import open_checkpoint  # noqa: E402
from inflight.models.implementation import read_config  # noqa: E402
from inflight.models.weights import WeightLoader  # noqa: E402
from inflight.runtime import loading  # noqa: E402
from inflight.runtime.state_store import Units  # noqa: E402
from inflight_kernels import BlockScaledWeight, CodedWeight, Inputs  # noqa: E402
from inflight_kernels.cpu import variants, variants_here  # noqa: E402

PAGE = ROOT / "backend" / "inflight" / "models" / "README.md"
BEGIN, END = "<!-- formats: made by python -m ci.format_table --write -->\n", "<!-- /formats -->\n"
PLACES = tuple(f"{place}{what}" for place in ("C++", "torch", "GPU") for what in ("", ", experts"))
COLUMNS = ("checkpoint", "weights", *PLACES, "a rank's share")
SIZE = 256
"""Of which every format has two whole groups, or one of K-quants."""
SIZES: dict[str, Any] = {**SHAPE, "hidden_size": SIZE, "intermediate_size": SIZE, "head_dim": 64}
del SIZES["num_hidden_layers"]
SIZES_OF_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": SIZE}
STEP = Step(prefills=[(0, 3)])
SHARES_OF_INPUTS, SHARES_OF_OUTPUTS = (16, 32, 64, 128), (1, 2, 4, 8, 16)
REFUSED = "refused"


@dataclass(frozen=True)
class Checkpoints:
    group: str
    weights: tuple[str, ...]
    """Of each layer."""
    write: Callable[[Path, PreTrainedConfig], TinyCheckpoint]
    options: dict[str, str] = field(default_factory=dict)
    """Keys of the engine."""


def checkpoints() -> Iterator[Checkpoints]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield Checkpoints("floats", (f"`{str(dtype).removeprefix('torch.')}`",), _writer_of(dtype))
    for name in ("int8", "int4", "fp8"):
        yield Checkpoints("floats, `quantization`", (f"`{name}`",), _writer_of(torch.float32), {"quantization": name})
    for name, kind in KINDS.items():
        group, weights = _words(kind.quantization)
        yield Checkpoints(group, (weights,), partial(_write_coded, name))
    names = [each.name for each in TENSOR_TYPES.values() if each.name not in NOT_READ]
    yield Checkpoints("GGUF", tuple(f"`{name}`" for name in names), partial(_write_gguf, names))


def _writer_of(dtype: torch.dtype) -> Callable[[Path, PreTrainedConfig], TinyCheckpoint]:
    return lambda folder, config: write_checkpoint(folder, config, 1, dtype)


def _write_coded(kind: str, folder: Path, config: PreTrainedConfig) -> TinyCheckpoint:
    return write_coded_checkpoint(folder, kind, config)


def _write_gguf(names: list[str], folder: Path, config: PreTrainedConfig) -> TinyCheckpoint:
    """A layer of each type."""

    def type_of(tensor: str) -> GGMLQuantizationType:
        _, _, layer = tensor.partition("model.layers.")
        return GGMLQuantizationType[names[int(layer.partition(".")[0])] if layer else "F32"]

    folder.mkdir()
    return TinyCheckpoint(gguf_folder.make_folder(write_model(folder, config, type_of).file), None)


def _words(quantization: dict[str, Any]) -> tuple[str, str]:
    """Group and weights, as the quantization_config of a config.json has them."""
    method = quantization["quant_method"]
    group = f"`{method}`"
    match method:
        case "compressed-tensors":
            (scheme,) = quantization["config_groups"].values()
            weights, inputs = scheme["weights"], scheme["input_activations"]
            words = f"{weights['type']}{weights['num_bits']} by {weights['strategy']}"
            words += " of {} × {}".format(*weights["block_structure"]) if weights["strategy"] == "block" else ""
            words += ", `actorder` `group`" if weights.get("actorder") == "group" else ""
            if not weights.get("symmetric", True):
                words += " with zero points"
            if inputs is not None:
                words += f", activations {inputs['type']}{inputs['num_bits']} by {inputs['strategy']}"
            return f"{group}, `{quantization['format']}`", words
        case "gptq":
            size = quantization["group_size"]
            words = [f"{quantization['bits']} bits"]
            words += ["one group"] if size < 0 else []
            words += ["`desc_act`"] if quantization["desc_act"] else []
            words += ["`gptq_v2`"] if quantization["checkpoint_format"] == "gptq_v2" else []
            return group, " ".join(words)
        case "awq":
            return group, f"{quantization['bits']} bits"
        case "bitsandbytes":
            return group, quantization["bnb_4bit_quant_type"]
        case "modelopt":
            return group, f"`{quantization['quant_algo']}`"
    if sizes := quantization.get("weight_block_size"):
        return group, f"blocks of {sizes[0]} × {sizes[1]}"
    return group, f"one scale, activations {quantization['activation_scheme']}"


# -- trying it ---------------------------------------------------------------------------------------------------------


def cells_of(tried: Checkpoints, folder: Path) -> list[tuple[str, ...]]:
    """Of each layer: in C++, in torch and on a GPU, each dense and with experts; then what ranks may have of it."""
    layers = {"num_hidden_layers": len(tried.weights)}
    configs = LlamaConfig(**SIZES, **layers), Qwen3MoeConfig(**SIZES, **SIZES_OF_EXPERTS, **layers)
    written = [tried.write(folder / config.model_type, config) for config in configs]
    columns = [
        try_it(checkpoint, tried.options) or [REFUSED] * len(tried.weights)
        for try_it in (_in_cpp, _in_torch, _on_gpu)
        for checkpoint in written
    ]
    return list(zip(*columns, _shares(written[0], tried), strict=True))


def _in_cpp(checkpoint: TinyCheckpoint, options: dict[str, str]) -> list[str] | None:
    """By each set of instructions of this machine, which all have to do the same."""
    found = []
    for variant in variants_here():
        with mock.patch.dict(os.environ, {variants.VARIABLE: variant.name}):
            found.append(_on_cpu(checkpoint, "true", options))
    assert all(each == found[0] for each in found)
    return found[0]


def _in_torch(checkpoint: TinyCheckpoint, options: dict[str, str]) -> list[str] | None:
    return _on_cpu(checkpoint, "false", options)


def _on_cpu(checkpoint: TinyCheckpoint, cpu_compile: str, options: dict[str, str]) -> list[str] | None:
    try:
        parts = loading.load_parts(
            config_of(checkpoint, cpu_compile, dtype="float32", num_threads="1", **options), SingleRank()
        )
    except ConfigurationError:
        return None
    held = _held(parts.networks[0])
    engine = loading.with_cache(parts, Units(16, None))
    assert isinstance(engine.decoder, CompiledNetwork) == (cpu_compile == "true")
    assert Network(engine.decoder, engine.store).logits(STEP).isfinite().all()
    return held


def _on_gpu(checkpoint: TinyCheckpoint, options: dict[str, str]) -> list[str] | None:
    """Of a fake device tensors have no values: they are checked and not read."""
    model: Any = read_config(config_of(checkpoint, "auto", **options))
    with fake_cuda(), open_checkpoint(checkpoint.folder, is_read=False) as tensors:
        loader = WeightLoader(tensors, model.weight_format, TensorParallelGroup(), torch.bfloat16, CUDA)
        try:
            return _held(load_decoder(model, loader, 64))
        except ConfigurationError:
            return None


def _held(decoder: Any) -> list[str]:
    """By the products of each layer: of experts, or else of all."""
    return [_held_by(layer) for layer in decoder.layers]


def _held_by(layer: Any) -> str:
    mlp = layer.branches[1].part
    if isinstance(mlp, Experts):
        held = [mlp.gate_up_ECD, mlp.down_EDI]
    else:
        held = [
            part.weight
            for part in (layer.branches[0].stateful.qkv, layer.branches[0].stateful.output, mlp.gate_up, mlp.down)
        ]
    (word,) = set(map(_word, held))
    return word


def _word(weight: Any) -> str:
    match weight:
        case CodedGroups(packed=packed):
            return _word(packed)
        case CodedWeight():
            return f"`{weight.code.value}`" + (" × int8" if weight.inputs is Inputs.INT8 else "")
        case DenseWeight() | Tensor():
            return "floats"
        case Int4Groups():
            return "`int4`"
        case Fp8Weight() | Fp8BlockWeight() | BlockScaledWeight():
            return "`fp8` × fp8"
    raise TypeError(f"nobody has named {type(weight).__name__}")


def _shares(checkpoint: TinyCheckpoint, tried: Checkpoints) -> list[str]:
    """Of each layer: the least inputs and outputs of a product that a rank can have."""
    model: Any = read_config(config_of(checkpoint, "auto", **tried.options))
    with open_checkpoint(checkpoint.folder) as tensors:
        layers = range(len(tried.weights))
        return [_share(model.weight_format, tensors, f"model.layers.{layer}.mlp.down_proj") for layer in layers]


def _share(weight_format: WeightFormat, tensors: Checkpoint, name: str) -> str:
    def empty(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    target = Target(dtype=torch.float32, device=torch.device("cpu"), empty=empty, keeps_codes=True)

    def read(outputs: range, inputs: range) -> str:
        block = Block(name=name, num_outputs=SIZE, num_inputs=SIZE, outputs=outputs, inputs=inputs)
        try:
            return _word(weight_format.read(tensors, [block], target))
        except ConfigurationError:
            return REFUSED

    every = range(SIZE)
    whole = read(every, every)
    by_inputs = {share: read(every, range(share, 2 * share)) for share in SHARES_OF_INPUTS} | {SIZE: whole}
    by_outputs = {share: read(range(share, 2 * share), every) for share in SHARES_OF_OUTPUTS}
    inputs, outputs = (
        next(share for share, word in found.items() if word == whole) for found in (by_inputs, by_outputs)
    )
    shown = {SHARES_OF_INPUTS[0]: "any", SIZE: "all inputs"}.get(inputs, f"{inputs} inputs")
    if isinstance(weight_format, CodedFormat) and inputs == weight_format.size_of_groups(SIZE):
        shown = "whole groups"
    if (smaller := by_inputs[SHARES_OF_INPUTS[0]]) not in (whole, REFUSED):
        shown += f", else {smaller}"
    return shown if outputs == SHARES_OF_OUTPUTS[0] else f"{shown}; {outputs} outputs"


# -- the page ----------------------------------------------------------------------------------------------------------


@contextmanager
def _gguf_cache(folder: Path) -> Iterator[None]:
    """Where folders are made of GGUF files meanwhile."""
    folder.mkdir()
    with mock.patch.object(gguf_folder, "cache_folder", lambda name: folder):
        yield


def format_table() -> str:
    """Markdown: weights of one group that have the same cells share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch, _gguf_cache(Path(scratch, "gguf")):
        for number, tried in enumerate(checkpoints()):
            folder = Path(scratch, str(number))
            folder.mkdir()
            for weights, cells in zip(tried.weights, cells_of(tried, folder), strict=True):
                rows.setdefault((tried.group, *cells), []).append(weights)
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    for (group, *cells), weights in rows.items():
        lines.append("| " + " | ".join((group, ", ".join(dict.fromkeys(weights)), *cells)) + " |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the table as it is now. Raises ValueError if it has no place for it."""
    return with_part(page, BEGIN, END, format_table())


if __name__ == "__main__":
    torch.set_num_threads(1)
    renew(PAGE, with_table, "The table is not what the formats do: python -m ci.format_table --write")
