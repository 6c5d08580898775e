"""What a row of the table of architectures says: what a GGUF file calls tensors and options of a network, and what
transformers calls them. Knows no architecture.

Names of tensors are given without the ending `.weight` or `.bias`, unless their description says otherwise; those of a
layer are relative to it. Keys are those of the metadata below the architecture's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.gguf.file import GgufFile
from inflight.gguf.metadata import Value
from inflight.gguf.orders import OrderOf

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
Q_BIAS = "self_attn.q_proj.bias"
LAYER_NORM = "attention.layer_norm_epsilon"
RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
BIASES = {"attention_bias": Q_BIAS, "mlp_bias": "mlp.down_proj.bias"}
NEUTRAL: dict[str, Value] = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Layers that attend to the last tokens only."""

    period: int = 1
    """Of so many layers all but the last have a window, where the file does not name them; 1 = all have one."""
    size: int = 0
    """Where the file does not say it; 0 = then no layer has one."""
    own_rope: bool = False
    """Whether the others alone scale positions, and the base of the rotation may be another one."""
    theta: float | None = None
    """That base, where the file does not say it; None = that of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    network: str
    """The class of transformers."""
    model_type: str
    """Its name in a config.json."""
    rotates_neighbours: bool = False
    """llama.cpp rotates pairs of neighbouring elements of a head, where transformers rotates pairs that are half a head
    apart, and the file's queries and keys are in that order. Where both rotate neighbours, it is false."""
    rotates_parts: bool = False
    """Some elements of a head may not be rotated."""
    adds_one: bool = False
    """The file has weights of norms plus 1, but for those of a mixer's heads."""
    layers: str = "model.layers"
    """Name of all layers."""
    top: Mapping[str, str] = field(default_factory=dict)
    """Of tensors outside of layers, where they are not those of TOP."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Of a layer's tensors, where they are not those of LAYER."""
    whole_names: Mapping[str, str] = field(default_factory=dict)
    """Of a layer's tensors, with their endings on both sides."""
    shared_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a layer's tensors that are several of transformers', which share the rows."""
    names_by_heads: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    """The same of queries, keys and values, one behind the other, of which each has the rows of its heads."""
    joined_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors of transformers -> those of a layer with their rows."""
    orders: Mapping[str, OrderOf] = field(default_factory=dict)
    """Of the rows of a layer's tensors, where transformers has another one."""
    column_orders: Mapping[str, OrderOf] = field(default_factory=dict)
    """The same of columns."""
    ones: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """A layer's vectors that have in transformers so many dimensions of 1 before and behind."""
    has_turned_matrices: bool = False
    """Whether transformers has matrices (inputs, outputs), where all files have (outputs, inputs)."""
    rows: frozenset[str] = frozenset({"ffn_gate_inp_shexp"})
    """A layer's tensors that are matrices of one row in transformers, and vectors in some files."""
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors with all experts of a layer -> the names of one's, which share the rows."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """What the file must say -> its name in config.json."""
    optional_keys: Mapping[str, str] = field(default_factory=dict)
    """What has transformers' default where the file does not say it."""
    quotients: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Of config.json -> what the file must say, the first divided by the second."""
    norm_eps: Mapping[str, str] = field(default_factory=lambda: RMS_NORM)
    """The same of what is added to a variance."""
    neutral: Mapping[str, Value] = field(default_factory=dict)
    """Keys that must have this value where they are there, beside those of NEUTRAL."""
    flags: Mapping[str, str] = field(default_factory=lambda: BIASES)
    """Options in config.json that say whether a layer has this tensor, whose name has its ending."""
    kinds: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Lists in config.json with a kind for each layer -> the first of these tensors that a layer has -> the kind."""
    told_by_tensors: frozenset[str] = frozenset()
    """Keys of what is so found."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """More of config.json, which the file does not say."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The same where it does not say it, and transformers' default is another one."""
    rope_values: Mapping[str, Any] = field(default_factory=dict)
    """The same of rope_parameters."""
    windows: Windows | None = None
    """None = no layer has one."""
    has_query_scalar: bool = False
    """Whether config.json says what the scores are divided by the root of: query_pre_attn_scalar."""
    scalar_of_hidden: int = 0
    """This is the size of a head, but in the model with so many layers the hidden size divided by the heads."""
    attends_to_latents: bool = False
    """Keys and values are made of latents, and only a part of each key is rotated."""
    own_values: Callable[[GgufFile, str, Sequence[bool]], Mapping[str, Any]] | None = None
    """What config.json has of a file, whose keys have this prefix, and of which these layers have a window, in place of
    what it has of files of other architectures. Raises ConfigurationError."""
    variants: Mapping[str | tuple[str, int], Architecture] = field(default_factory=dict)
    """Other networks in files of this architecture: those that say this, and do not say 0, or say this number."""

    @property
    def layer_names(self) -> dict[str, str]:
        return {**LAYER, **self.names}

    @property
    def top_names(self) -> dict[str, str]:
        return {**TOP, **self.top}

    @property
    def needed_keys(self) -> dict[str, str]:
        return {**self.norm_eps, **self.keys}

    @property
    def neutral_values(self) -> dict[str, Value]:
        return {key: value for key, value in {**NEUTRAL, **self.neutral}.items() if key not in self.known_keys}

    @property
    def known_keys(self) -> set[str]:
        """Beside those of every architecture."""
        divided = {key for keys in self.quotients.values() for key in keys}
        return {*self.needed_keys, *self.optional_keys, *divided, *self.told_by_tensors}
