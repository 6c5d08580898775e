"""A decoder layer's operations compiled for this very CPU by torch's inductor, ahead of time, and kept on disk.

The torch reference is right on every machine; what costs there is not arithmetic but the dozens of small operations
between the matrix products, and products that lay their weights out anew each time. Here the small operations are
fused into four programs and weights are laid out once; a step of one token runs one program a layer.
"""

from inflight_kernels.cpu.decoder_kernels import DecoderKernels
from inflight_kernels.cpu.graphs import LayerShape
from inflight_kernels.cpu.huge_pages import HugePageArena
from inflight_kernels.cpu.packed_linear import can_pack, pack_weight, packed_linear
from inflight_kernels.cpu.program_cache import find_compiler
from inflight_kernels.cpu.token_layer import TokenLayer, TokenProduct

__all__ = [
    "DecoderKernels",
    "HugePageArena",
    "LayerShape",
    "TokenLayer",
    "TokenProduct",
    "can_pack",
    "find_compiler",
    "pack_weight",
    "packed_linear",
]
