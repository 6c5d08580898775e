"""Weights of floats that become codes when they are read (the configuration's key `quantization`).

Legend: I input features, O output features, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.errors import ConfigurationError
from inflight.layers.weight import Weight
from inflight.models.checkpoint import FLOAT_DTYPES, Checkpoint
from inflight.models.formats.code_cache import CodeCache, Tile
from inflight.models.formats.coded import GROUP_UNIT, CodedFormat, Coding, Part
from inflight.models.formats.format import Block, Target
from inflight.models.formats.reading import read_weight
from inflight_kernels import Code, CodedWeight, join_halves

GROUP_SIZES = {Code.INT8: 128, Code.FP8: 128, Code.INT4: 64}
"""Inputs that share a scale, if a rank's are whole groups of so many; else half as many, or a quarter. So ranks make
the codes that one rank makes wherever their shares are whole groups."""
HEAD_CODES = {Code.INT4: Code.INT8}
"""Of the head, where it has other codes than the layers: a wrong logit is a wrong token."""
NUMBERS_AT_ONCE = 2**16
"""That are quantised: what is computed of them stays in the second cache."""
SHARES = tuple(1.0 - 0.04 * step for step in range(8))
"""Of the scale with which the largest weight of a group fits, those that are tried for 4 bits."""


@dataclass(frozen=True, slots=True)
class OnLoadFormat(CodedFormat):
    """`<name>.weight` (O, I), of any float type, as codes with a scale for each group of inputs of an output."""

    code: Code
    cache: CodeCache | None = None
    """Of codes that were made before; None = they are made anew. For CPUs: a GPU may add up in another order."""

    @property
    def quantized(self) -> str:
        """See WeightFormat."""
        return self.code.value

    @property
    def coding(self) -> Coding:
        """See CodedFormat."""
        return Coding(code=self.code, group_size=GROUP_UNIT, scale_dtype=torch.float16)

    def size_of_groups(self, num_inputs: int) -> int:
        """See CodedFormat."""
        return group_size_of(self.code, num_inputs)

    def is_dense(self, checkpoint: Checkpoint, name: str) -> bool:
        """See CodedFormat."""
        return False

    def check(self, checkpoint: Checkpoint, block: Block) -> None:
        """See CodedFormat."""
        checkpoint.check(f"{block.name}.weight", block.shape, FLOAT_DTYPES)

    def read_part(self, checkpoint: Checkpoint, block: Block, device: torch.device) -> Part:
        """See CodedFormat."""
        values_OI = read_weight(checkpoint, block, torch.float32, FLOAT_DTYPES, device)
        return Part(*quantize(self.code, values_OI, self.size_of_groups(values_OI.shape[1])))

    def read(self, checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> Weight:
        """See WeightFormat."""
        if not target.keeps_codes and target.device.type == "cpu":
            raise ConfigurationError(
                f"quantization is {self.code.value}, which layers in C++ multiply on a CPU, and they do not run here; "
                "set cpu_compile to auto, or quantization to none"
            )
        if target.device.type == "cuda" and self.code is not Code.INT4:
            raise ConfigurationError(
                f"quantization is {self.code.value}, which is multiplied on CPUs only; set it to int4 or none"
            )
        return CodedFormat.read(self, checkpoint, blocks, target)

    def fill_rows(self, checkpoint: Checkpoint, block: Block, weight: CodedWeight) -> None:
        """See CodedFormat."""
        self.keep(
            weight,
            block.name,
            block.outputs,
            block.inputs,
            lambda: CodedFormat.fill_rows(self, checkpoint, block, weight),
        )

    def keep(self, weight: CodedWeight, name: str, outputs: range, inputs: range, quantize: Callable[[], None]) -> None:
        """Fill a weight, which is these features of the one of that name, with codes that were made of it before;
        `quantize` makes them if there are none."""
        tile = Tile(
            name=name,
            outputs=(outputs.start, outputs.stop),
            inputs=(inputs.start, inputs.stop),
            code=weight.code.value,
            group_size=weight.group_size,
        )
        if self.cache is None or not self.cache.read(tile, weight):
            quantize()

    @staticmethod
    def allocate(code: Code, shape: Sequence[int], target: Target) -> CodedWeight:
        """Of `shape` (…, O, I), for `quantize_into`: of a head, or of experts."""
        *rows, num_inputs = shape
        group_size = group_size_of(code, num_inputs)
        return CodedWeight(
            code=code,
            codes=target.empty(*rows, num_inputs * code.bits // 8, dtype=torch.uint8),
            scales=target.empty(*rows, -(-num_inputs // group_size), dtype=torch.float16),
            zeros=None,
            group_size=group_size,
            inputs=target.inputs_of(code),
        )


def group_size_of(code: Code, num_inputs: int) -> int:
    """Inputs that share a scale, of a rank's `num_inputs`."""
    size = GROUP_SIZES[code]
    while size > GROUP_UNIT and num_inputs % size:
        size //= 2
    return size


def quantize_into(weight: CodedWeight, values_OI: Tensor) -> None:
    """Write what `values_OI` become into a weight (O, I)."""
    codes, scales = quantize(weight.code, values_OI, weight.group_size)
    weight.codes.copy_(codes if weight.code.bits == 8 else join_halves(codes))
    weight.scales.copy_(scales)


def quantize(code: Code, values_OI: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes (O, I), uint8, and scales (O, G), float16, of floats: each code is the one nearest to its value. Of 4 bits
    the scale is the one of several with which the squares of a group's errors sum to least."""
    num_rows, num_threads = max(NUMBERS_AT_ONCE // values_OI.shape[1], 1), torch.get_num_threads()
    # Each thread has rows of its own: operations on so few numbers would mostly wait for each other's threads.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads) as threads:
            some = torch.split(values_OI, num_rows)
            parts = list(threads.map(lambda rows: _quantize_rows(code, rows.float(), group_size), some))
    finally:
        torch.set_num_threads(num_threads)
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantize_rows(code: Code, values_OI: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    padded = torch.nn.functional.pad(values_OI, (0, -values_OI.shape[1] % group_size))
    # A column for each group (inputs, N): reductions over the first dimension are fast.
    groups = padded.view(-1, group_size).T.contiguous()
    match code:
        case Code.INT8:
            scales = _fit(groups.abs().amax(0), 127)
            codes = _nearest(groups, scales, -127, 127).to(torch.int8).view(torch.uint8)
        case Code.FP8:
            scales = _fit(groups.abs().amax(0), 448)
            codes = (groups / scales.float()).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        case Code.INT4:
            scales = _best_of_four_bits(groups)
            codes = _nearest(groups, scales, -8, 7).to(torch.int8).view(torch.uint8) & 15
        case _:
            raise ValueError(f"weights are not quantised to {code.value} when they are read")
    num_rows, num_inputs = values_OI.shape
    return codes.T.reshape(num_rows, -1)[:, :num_inputs].contiguous(), scales.view(num_rows, -1)


def _best_of_four_bits(groups: Tensor) -> Tensor:
    """(N,): the number with the largest magnitude becomes about -8, of which there is one more than of 7."""
    low, high = groups.amin(0), groups.amax(0)
    extreme = torch.where(-low > high, low, high)
    best = least = torch.empty(0)
    for number, share in enumerate(SHARES):
        scales = _fit(extreme * share, -8)
        errors = _nearest(groups, scales, -8, 7).mul_(scales.float()).sub_(groups).square_().sum(0)
        if number == 0:
            best, least = scales, errors
        else:
            best, least = torch.where(errors < least, scales, best), torch.minimum(errors, least)
    return best


def _fit(extremes: Tensor, most: int) -> Tensor:
    """The scales with which these become `most`; 1 for a group of zeros, or of what float16 has no scale for."""
    scales = (extremes / most).half()
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _nearest(groups: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """Whole numbers, float32."""
    return (groups / scales.float()).round_().clamp_(low, high)
