"""How a checkpoint stores the weight of a matrix product, and how a rank reads its part of it.

Knows neither layers' names nor how they split. Legend: I input features, O output features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from inflight.errors import ConfigurationError
from inflight.layers.weight import DenseWeight, Fp8Weight, Int4Groups, Weight
from inflight.models.checkpoint import FLOAT_DTYPES, Checkpoint
from inflight.models.compressed_tensors import Fp8Scheme, read_scheme
from inflight_kernels import repack_awq
from inflight_kernels.quantization import FP8_CAPABILITY

DEQUANTIZED_ON = frozenset({"cpu"})
"""Device types whose weights are dequantised when they are read. A CPU has no product of 4-bit weights: it would
dequantise them at every step."""
FP8_DTYPES = ("F8_E4M3",)
"""As safetensors name it."""
OUTPUTS_OF_WORD = 8
"""Output features that a word of 32 bits of an AWQ checkpoint holds."""
MODELOPT_CACHES = (None, "FP8", {"type": "float", "num_bits": 8, "dynamic": False})
"""No scales of the KV cache, or those of fp8 as hf_quant_config.json and config.json name them. They are read as those
of others are, whether weights are quantised or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The rows and columns of one weight (O, I) in the checkpoint that a rank reads."""

    name: str
    """Of the layer: the names of its tensors without their ending."""
    num_outputs: int
    num_inputs: int
    """Both of the whole weight."""
    outputs: range
    inputs: range


class Allocate(Protocol):
    """Makes a tensor of a weight, where the network's weights lie; its values are undefined."""

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """`dtype`: None = that of the activations."""
        ...


class WeightFormat(Protocol):
    """The format of the weights of all layers of a checkpoint."""

    quantized: ClassVar[str]
    """The type of quantised weights in the checkpoint, int4, fp8 or gguf; empty if all are floats."""
    reads_experts: ClassVar[bool]
    """Whether the matrices of experts may be quantised."""

    def read(
        self,
        checkpoint: Checkpoint,
        blocks: Sequence[Block],
        dtype: torch.dtype,
        device: torch.device,
        empty: Allocate,
    ) -> Weight:
        """One weight with the outputs of all `blocks`, which have the same number of inputs.

        `dtype` is that of the activations. `empty`: makes the tensors that the weight keeps as they are read. Raises
        ConfigurationError if the checkpoint does not hold the tensors, if the format cannot be divided at the borders
        of the blocks, or if the device cannot multiply it.
        """
        ...


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """`<name>.weight` (O, I), of any float type."""

    quantized: ClassVar[str] = ""
    reads_experts: ClassVar[bool] = False

    def read(
        self,
        checkpoint: Checkpoint,
        blocks: Sequence[Block],
        dtype: torch.dtype,
        device: torch.device,
        empty: Allocate,
    ) -> DenseWeight:
        """See WeightFormat."""
        return DenseWeight(_read_values(checkpoint, blocks, empty))


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """4-bit weights as AWQ stores them: for each layer `qweight` (I, O / 8) and `qzeros` (I / group_size, O / 8), int32
    with eight outputs in a word, and `scales` (I / group_size, O), float16. Layers that have a `weight` instead, since
    they were not quantised, are dense.
    """

    quantized: ClassVar[str] = "int4"
    reads_experts: ClassVar[bool] = False
    group_size: int

    def read(
        self,
        checkpoint: Checkpoint,
        blocks: Sequence[Block],
        dtype: torch.dtype,
        device: torch.device,
        empty: Allocate,
    ) -> Weight:
        """See WeightFormat."""
        if f"{blocks[0].name}.weight" in checkpoint:
            return DenseFormat().read(checkpoint, blocks, dtype, device, empty)
        is_dequantized = device.type in DEQUANTIZED_ON
        # Packed weights are of 16 bits; what is dequantised may become wider, from the type that its scales have.
        packed_dtype = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16
        if packed_dtype != dtype and not is_dequantized:
            raise ConfigurationError(
                f"{checkpoint.folder}: 4-bit weights are computed in float16 or bfloat16, not in "
                f"{str(dtype).removeprefix('torch.')}; set dtype to one of them"
            )
        for block in blocks:
            self._check_borders(checkpoint, block)
        qweight = self._read_tensor(checkpoint, blocks, "qweight", 1, torch.int32, device)
        qzeros = self._read_tensor(checkpoint, blocks, "qzeros", self.group_size, torch.int32, device)
        scales = self._read_tensor(checkpoint, blocks, "scales", self.group_size, packed_dtype, device)
        if not is_dequantized:
            return Int4Groups(repack_awq(qweight, qzeros, scales))
        values_OI = empty(*_shape(blocks))
        if checkpoint.is_read:
            values_OI.copy_(repack_awq(qweight, qzeros, scales).dequantize())
        return DenseWeight(values_OI)

    def _read_tensor(
        self,
        checkpoint: Checkpoint,
        blocks: Sequence[Block],
        kind: str,
        inputs_of_row: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """The blocks' parts of their tensors `kind`, side by side."""
        outputs_of_column, dtypes = (1, ("F16",)) if kind == "scales" else (OUTPUTS_OF_WORD, ("I32",))
        shapes = [(block.num_inputs // inputs_of_row, block.num_outputs // outputs_of_column) for block in blocks]
        for block, shape in zip(blocks, shapes, strict=True):
            checkpoint.check(f"{block.name}.{kind}", shape, dtypes)
        parts = []
        for block, shape in zip(blocks, shapes, strict=True):
            size = (len(block.inputs) // inputs_of_row, len(block.outputs) // outputs_of_column)
            starts = (block.inputs.start // inputs_of_row, block.outputs.start // outputs_of_column)
            part = torch.empty(size, dtype=dtype, device=device)
            checkpoint.copy_into(part, f"{block.name}.{kind}", shape, starts, dtypes)
            parts.append(part)
        return torch.cat(parts, dim=1)

    def _check_borders(self, checkpoint: Checkpoint, block: Block) -> None:
        for what, features, total, unit in (
            ("inputs", block.inputs, block.num_inputs, self.group_size),
            ("outputs", block.outputs, block.num_outputs, OUTPUTS_OF_WORD),
        ):
            if features.start % unit or len(features) % unit or total % unit:
                raise ConfigurationError(
                    f"{checkpoint.folder}: the {total} {what} of {block.name} are quantised in groups of {unit}, "
                    f"and one rank's share of them, {len(features)}, is not a whole number of groups; "
                    "choose another tensor_parallel_size"
                )


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """fp8 weights as compressed-tensors, AutoFP8 and ModelOpt store them: for each layer `weight` (O, I),
    float8_e4m3fn, and `weight_scale`, a float, (O, 1) or, if it is one for all outputs, of one element; with static
    activations also `input_scale`, a float of one element. Layers whose `weight` is of another type were not quantised,
    and are dense.
    """

    quantized: ClassVar[str] = "fp8"
    reads_experts: ClassVar[bool] = False
    scheme: Fp8Scheme

    def read(
        self,
        checkpoint: Checkpoint,
        blocks: Sequence[Block],
        dtype: torch.dtype,
        device: torch.device,
        empty: Allocate,
    ) -> Weight:
        """See WeightFormat."""
        if checkpoint.dtype_of(f"{blocks[0].name}.weight") not in FP8_DTYPES:
            return DenseFormat().read(checkpoint, blocks, dtype, device, empty)
        if device.type == "cuda":
            _refuse_without_fp8(checkpoint, device)
        values_OI = _read_values(checkpoint, blocks, empty, torch.float8_e4m3fn, FP8_DTYPES)
        scale_O = self._read_scales(checkpoint, blocks, empty)
        return Fp8Weight(values_OI, scale_O, self._read_input_scale(checkpoint, blocks))

    def _read_input_scale(self, checkpoint: Checkpoint, blocks: Sequence[Block]) -> float | None:
        """One for all tokens, the same on every rank. The blocks have one input: of their scales it is the largest,
        whose range holds that of the others. vLLM takes the same."""
        if not self.scheme.has_input_scale:
            return None
        return max(checkpoint.read_scale(f"{block.name}.input_scale") for block in blocks)

    def _read_scales(self, checkpoint: Checkpoint, blocks: Sequence[Block], empty: Allocate) -> Tensor:
        """(O,) float32, also of weights that have one scale: stacked layers have different ones."""
        scale_O = empty(sum(len(block.outputs) for block in blocks), dtype=torch.float32)
        parts = torch.split(scale_O, [len(block.outputs) for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            name = f"{block.name}.weight_scale"
            if self.scheme.has_scale_per_output:
                checkpoint.check_scales(name, (block.num_outputs, 1))
                checkpoint.copy_into(part[:, None], name, (block.num_outputs, 1), (block.outputs.start,))
                continue
            scale = checkpoint.read_scale(name)
            if checkpoint.is_read:
                part.fill_(scale)
        return scale_O


def _refuse_without_fp8(checkpoint: Checkpoint, device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise ConfigurationError(
            f"{checkpoint.folder}: fp8 weights need a GPU of compute capability 8.9 (Ada) or more, and this one has "
            f"{capability[0]}.{capability[1]}; use the float16 or bfloat16 checkpoint"
        )


def _read_values(
    checkpoint: Checkpoint,
    blocks: Sequence[Block],
    empty: Allocate,
    dtype: torch.dtype | None = None,
    dtypes: tuple[str, ...] = FLOAT_DTYPES,
) -> Tensor:
    """The blocks' parts of their tensors `weight`, one below the other: (O, I) of `dtype`. `dtypes`: of the tensors."""
    for block in blocks:
        checkpoint.check(f"{block.name}.weight", (block.num_outputs, block.num_inputs), dtypes)
    values_OI = empty(*_shape(blocks), dtype=dtype)
    parts = torch.split(values_OI, [len(block.outputs) for block in blocks])
    for block, part in zip(blocks, parts, strict=True):
        shape, starts = (block.num_outputs, block.num_inputs), (block.outputs.start, block.inputs.start)
        checkpoint.copy_into(part, f"{block.name}.weight", shape, starts, dtypes)
    return values_OI


def _shape(blocks: Sequence[Block]) -> tuple[int, int]:
    """(O, I) of the weight of all blocks."""
    return sum(len(block.outputs) for block in blocks), len(blocks[0].inputs)


def choose_weight_format(path: Path, quantization: Mapping[str, Any]) -> WeightFormat:
    """The format that `quantization`, of the checkpoint with the config.json at `path`, describes; dense if it is empty
    or of the KV cache alone.

    Raises ConfigurationError for formats that are not supported.
    """
    if not quantization:
        return DenseFormat()
    method = quantization.get("quant_method", "unknown")
    if method == "gguf":
        from inflight.models.gguf_format import GgufFormat  # which is made of what is here

        return GgufFormat()
    if method == "compressed-tensors":
        scheme = read_scheme(path, quantization)
        return Fp8Format(scheme) if scheme else DenseFormat()
    if method == "awq":
        return _choose_awq(path, quantization)
    if method == "fp8":
        return _choose_autofp8(path, quantization)
    if method == "modelopt":
        algorithm = quantization.get("quant_algo")
        cache = quantization.get("kv_cache_quant_algo") or quantization.get("kv_cache_scheme")
        if algorithm in (None, "FP8") and cache in MODELOPT_CACHES:
            scheme = Fp8Scheme(has_scale_per_output=False, has_input_scale=True)
            return Fp8Format(scheme) if algorithm else DenseFormat()
        method = f"modelopt, quant_algo {algorithm}, kv_cache_quant_algo {cache}"
    raise ConfigurationError(
        f"{path}: quantized checkpoints ({method}) are not supported; use the float16, bfloat16 or float32 one, or one "
        "that awq quantized to 4 bits, or llm-compressor's schemes FP8_DYNAMIC and FP8, AutoFP8 or ModelOpt to fp8"
    )


def _choose_autofp8(path: Path, quantization: Mapping[str, Any]) -> Fp8Format:
    if blocks := quantization.get("weight_block_size"):
        raise ConfigurationError(
            f"{path}: quantization_config.weight_block_size must be null, got {json.dumps(blocks)}: fp8 weights with a "
            "scale for each block are not supported; use the float16 or bfloat16 checkpoint, or one that "
            "llm-compressor's scheme FP8_DYNAMIC quantized to fp8"
        )
    activations, cache = quantization.get("activation_scheme"), quantization.get("kv_cache_scheme")
    if activations not in ("static", "dynamic"):
        raise ConfigurationError(
            f'{path}: quantization_config.activation_scheme must be "static" or "dynamic", got '
            f"{json.dumps(activations)}"
        )
    if cache not in (None, "static"):
        raise ConfigurationError(
            f'{path}: quantization_config.kv_cache_scheme must be "static" or null, got {json.dumps(cache)}'
        )
    # AutoFP8 means one dynamic scale for all tokens of a call. That would make a token depend on the others of its
    # step, so each token has a scale of its own, with which it is rounded no worse.
    return Fp8Format(Fp8Scheme(has_scale_per_output=False, has_input_scale=activations == "static"))


def _choose_awq(path: Path, quantization: Mapping[str, Any]) -> AwqFormat:
    group_size = quantization.get("group_size", quantization.get("q_group_size"))
    bits = quantization.get("bits", quantization.get("w_bit"))
    version = str(quantization.get("version", "gemm")).lower()
    if (bits, version, quantization.get("zero_point", True)) != (4, "gemm", True):
        raise ConfigurationError(
            f"{path}: of awq checkpoints only those with bits 4, version gemm and zero_point true are supported, "
            f"not bits {bits}, version {version} and zero_point {quantization.get('zero_point')}; use the float16 or "
            "bfloat16 checkpoint"
        )
    if type(group_size) is not int or group_size < 1 or group_size % 32:
        raise ConfigurationError(f"{path}: quantization_config.group_size must be a multiple of 32, got {group_size!r}")
    return AwqFormat(group_size)
