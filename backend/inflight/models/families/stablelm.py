"""StableLM: Llama with LayerNorm, of which a part of each head is rotated."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family, NormStyle


def describe(config: ConfigValues) -> Family:
    """See Family."""
    if config.flag("qk_layernorm"):
        raise config.not_native("qk_layernorm", "false")
    norms = NormStyle(eps=config.eps("layer_norm_eps"), centers=True, bias=True)
    family = with_llamas_tensors(config, norms=norms, qkv_bias=config.flag("use_qkv_bias"))
    family = replace(family, partial_rotary=True)
    if not config.flag("use_parallel_residual"):
        return family
    return replace(family, mlp=replace(family.mlp, norm=None), is_parallel=True)
