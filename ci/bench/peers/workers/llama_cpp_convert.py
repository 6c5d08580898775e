"""A Llama's checkpoint in bfloat16 as a GGUF file: CHECKPOINT TARGET FORMAT.

Vocabulary is left out, because prompts are token ids. Quantised formats are what llama.cpp itself makes of it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

FORMATS = {
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(checkpoint: str, target: str, form: str) -> None:
    if form == "bf16":
        write_bfloat16(Path(checkpoint), target)
        return
    plain = f"{target}.bf16"
    write_bfloat16(Path(checkpoint), plain)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FORMATS[form]
    if llama_cpp.llama_model_quantize(plain.encode(), target.encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp made no {form} of {plain}")
    Path(plain).unlink()


def write_bfloat16(checkpoint: Path, target: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, values in tensors(checkpoint / "model.safetensors"):
        own = gguf_name(name)
        if own.split(".")[-2] in heads:
            values = neighbours(values, heads[own.split(".")[-2]])
        if values.ndim == 1:
            writer.add_tensor(own, values)
        else:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(own, packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values in float32 of a safetensors file of bfloat16."""
    data = np.memmap(file, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        assert tensor["dtype"] == "BF16", tensor
        first, last = tensor["data_offsets"]
        halves = np.frombuffer(data[start + first : start + last].tobytes(), np.uint16)
        yield name, (halves.astype(np.uint32) << 16).view(np.float32).reshape(tensor["shape"])


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        number, _, name = name.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{NAMES[name]}.weight"
    return f"{NAMES[name]}.weight"


def neighbours(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head in the order of llama.cpp, whose rotary embedding turns neighbours instead of halves."""
    return values.reshape(num_heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


if __name__ == "__main__":
    main(*sys.argv[1:])
