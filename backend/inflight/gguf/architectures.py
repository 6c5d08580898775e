"""The architectures of GGUF files, as llama.cpp calls them, and the classes of transformers that compute the same.

Names of tensors are given without the ending `.weight` or `.bias`; those of a layer are relative to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.errors import ConfigurationError
from inflight.gguf.metadata import Metadata

ARCHITECTURE = "general.architecture"

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MIXTRAL_LAYER = {"ffn_gate_inp": "block_sparse_moe.gate"}
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
QWEN_LAYER = {"ffn_gate_inp": "mlp.gate"}
QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    network: str
    """The class of transformers."""
    model_type: str
    """Its name in a config.json."""
    rotates_neighbours: bool = False
    """llama.cpp rotates pairs of neighbouring elements of a head, and the file's queries and keys are in that order;
    else pairs that are half a head apart, as transformers does for all."""
    rotates_parts: bool = False
    """Some elements of a head may not be rotated."""
    names: dict[str, str] = field(default_factory=dict)
    """Of a layer's tensors, where they are not those of LAYER."""
    experts: dict[str, str] = field(default_factory=dict)
    """Tensors with all experts of a layer -> the name of one's."""

    @property
    def layer_names(self) -> dict[str, str]:
        return {**LAYER, **self.names}


LLAMA = Architecture(network="LlamaForCausalLM", model_type="llama", rotates_neighbours=True)
MISTRAL = Architecture(network="MistralForCausalLM", model_type="mistral", rotates_neighbours=True)
"""Of the files of architecture llama, those with a sliding window, which Llama has not."""
MIXTRAL = Architecture(
    network="MixtralForCausalLM",
    model_type="mixtral",
    rotates_neighbours=True,
    names=MIXTRAL_LAYER,
    experts=MIXTRAL_EXPERTS,
)
"""Of the files of architecture llama, those with experts."""
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": Architecture(network="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": Architecture(network="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": Architecture(
        network="Qwen3MoeForCausalLM", model_type="qwen3_moe", names=QWEN_LAYER, experts=QWEN_EXPERTS
    ),
    "phi3": Architecture(
        network="Phi3ForCausalLM", model_type="phi3", rotates_parts=True, names={"ffn_up": "mlp.gate_up_proj"}
    ),
    "granite": Architecture(network="GraniteForCausalLM", model_type="granite", rotates_neighbours=True),
}
"""By general.architecture."""


def find_architecture(metadata: Metadata) -> Architecture:
    """Raises ConfigurationError, which names those that are supported."""
    name = metadata.text(ARCHITECTURE)
    if name not in ARCHITECTURES:
        raise ConfigurationError(
            f"{metadata.path}: {ARCHITECTURE} {name!r} is not supported in GGUF files; these are: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if name == "llama" and metadata.whole("llama.expert_count", 0):
        return MIXTRAL
    if name == "llama" and "llama.attention.sliding_window" in metadata:
        return MISTRAL
    return ARCHITECTURES[name]
