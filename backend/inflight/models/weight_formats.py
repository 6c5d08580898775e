"""Which format a checkpoint's weights have: what the `quantization_config` of its config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.errors import ConfigurationError
from inflight.models.compressed_tensors import Fp8Blocks, Fp8Scheme, Mxfp4Scheme, Scheme, read_scheme
from inflight.models.formats.awq import choose_awq
from inflight.models.formats.bitsandbytes import choose_bitsandbytes
from inflight.models.formats.dense import DenseFormat
from inflight.models.formats.format import WeightFormat
from inflight.models.formats.fp8 import Fp8BlockFormat, Fp8Format, choose_fp8
from inflight.models.formats.gguf import GgufFormat
from inflight.models.formats.gptq import choose_gptq
from inflight.models.formats.mxfp4 import Mxfp4Experts
from inflight.models.formats.packed import Mxfp4Format, PackedFormat

MODELOPT_CACHES = (None, "FP8", {"type": "float", "num_bits": 8, "dynamic": False})
"""No scales of the KV cache, or those of fp8 as hf_quant_config.json and config.json name them. They are read as those
of others are, whether weights are quantised or not."""


def choose_weight_format(path: Path, quantization: Mapping[str, Any]) -> WeightFormat:
    """The format that `quantization`, of the checkpoint with the config.json at `path`, describes; dense if it is empty
    or of the KV cache alone.

    Raises ConfigurationError for formats that are not supported.
    """
    if not quantization:
        return DenseFormat()
    method = quantization.get("quant_method", "unknown")
    match method:
        case "compressed-tensors":
            return _of_scheme(read_scheme(path, quantization))
        case "awq":
            return choose_awq(path, quantization)
        case "bitsandbytes":
            return choose_bitsandbytes(path, quantization)
        case "gguf":
            return GgufFormat()
        case "gptq":
            return choose_gptq(path, quantization)
        case "fp8":
            return choose_fp8(path, quantization)
        case "mxfp4":
            return Mxfp4Experts()
    if method == "modelopt":
        algorithm = quantization.get("quant_algo")
        cache = quantization.get("kv_cache_quant_algo") or quantization.get("kv_cache_scheme")
        if algorithm in (None, "FP8") and cache in MODELOPT_CACHES:
            scheme = Fp8Scheme(has_scale_per_output=False, has_input_scale=True)
            return Fp8Format(scheme) if algorithm else DenseFormat()
        method = f"modelopt, quant_algo {algorithm}, kv_cache_quant_algo {cache}"
    raise ConfigurationError(
        f"{path}: quantized checkpoints ({method}) are not supported; use the float16, bfloat16 or float32 one, or one "
        "that awq or gptq quantized to 4 bits, or bitsandbytes to nf4, or llm-compressor's schemes W4A16, W8A16, W8A8, "
        "FP8_DYNAMIC, FP8_BLOCK and FP8, AutoFP8 or ModelOpt to fp8"
    )


def _of_scheme(scheme: Scheme | None) -> WeightFormat:
    match scheme:
        case None:
            return DenseFormat()
        case Fp8Scheme():
            return Fp8Format(scheme)
        case Fp8Blocks():
            return Fp8BlockFormat(outputs=scheme.outputs, inputs=scheme.inputs, scales="weight_scale")
        case Mxfp4Scheme():
            return Mxfp4Format()
    return PackedFormat(scheme)
