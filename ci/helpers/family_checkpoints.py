"""Small random checkpoints of native families as their publishers lay them out: beside the weights a tokenizer, its
special tokens, and a chat template of the family's style."""

from __future__ import annotations

import codecs
import itertools
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from chat_templates import SHAPES
from random_configs import OPTIONS, draw_config
from tiny_checkpoints import NearTie, TinyCheckpoint, write_checkpoint
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

EACH_BYTE = "each byte"
"""An error handler of codecs: every byte that is no UTF-8 is U+FFFD, as the tokenizers library has it."""
codecs.register_error(EACH_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]

DEFAULT = Path(__file__).parents[2] / "model_repository" / "llm" / "1" / "checkpoint"
CORPUS = [
    "Once upon a time a little dog and a happy cat lived in a house near the park.",
    "They told each other stories of foxes, of rain and of the 12 moons: naïve, größe, 日本語, 🙂.",
]
VOCABULARY_SIZE = 384
NUM_UNNAMED = 8
"""Rows of the embeddings for which the tokenizer has no text, as in most published checkpoints."""
MAX_LENGTH = 512
KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")
"""Keys of configurations that hold a kind for each layer."""
NUM_TRIES = 20
"""Questions of which one has an answer that does not depend on rounding."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a publisher's tokenizer and template work."""

    ends: tuple[str, ...]
    """Tokens that end an answer."""
    begin: str = ""
    """Token before each text."""
    more: tuple[str, ...] = ()
    """The template's other tokens."""
    shape: str = ""
    """Of SHAPES; "" = a base model, which has no template."""
    pieces: bool = False
    """Whether tokens are SentencePiece's, not bytes and what is merged of them."""
    prefix: str = ""
    """With pieces: what stands before each text."""


CHATML = Style(ends=("<|im_end|>", "<|endoftext|>"), more=("<|im_start|>", "<think>", "</think>"), shape="Qwen3")
BASE = Style(ends=("<|endoftext|>",))
LLAMA = Style(
    begin="<|begin_of_text|>",
    ends=("<|eot_id|>", "<|end_of_text|>"),
    more=("<|start_header_id|>", "<|end_header_id|>"),
    shape="Llama 3.1",
)
MISTRAL = Style(
    begin="<s>", ends=("</s>",), more=("[INST]", "[/INST]"), shape="Mistral, version 3", pieces=True, prefix="▁"
)
PHI_3 = Style(
    ends=("<|end|>", "<|endoftext|>"),
    more=("<|user|>", "<|assistant|>", "<|system|>"),
    shape="Phi 3",
    pieces=True,
    prefix="▁",
)
GEMMA_2 = Style(begin="<bos>", ends=("<eos>", "<end_of_turn>"), more=("<start_of_turn>",), shape="Gemma 2", pieces=True)
GEMMA_3 = Style(
    begin="<bos>",
    ends=("<eos>", "<end_of_turn>"),
    more=("<start_of_turn>", "<start_of_image>"),
    shape="Gemma 3",
    pieces=True,
)
GEMMA_4 = Style(
    begin="<bos>",
    ends=("<eos>", "<turn|>"),
    more=("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    shape="Gemma 4",
    pieces=True,
)
DEEPSEEK = Style(
    begin="<｜begin▁of▁sentence｜>",
    ends=("<｜end▁of▁sentence｜>",),
    more=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    shape="DeepSeek R1, distilled",
)
GPT_OSS = Style(
    begin="<|startoftext|>",
    ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    more=("<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
    shape="gpt-oss",
)
STYLES = {
    "LlamaForCausalLM": LLAMA,
    "ArceeForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MISTRAL,
    "Phi3ForCausalLM": PHI_3,
    "Gemma2ForCausalLM": GEMMA_2,
    "Gemma3ForCausalLM": GEMMA_3,
    "Gemma4ForCausalLM": GEMMA_4,
    "Gemma4UnifiedForCausalLM": GEMMA_4,
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "GptOssForCausalLM": GPT_OSS,
    "GPT2LMHeadModel": BASE,
    "GPTNeoXForCausalLM": BASE,
    "OPTForCausalLM": BASE,
    "PhiForCausalLM": BASE,
    "Starcoder2ForCausalLM": BASE,
}
"""Architecture -> its style; of all others CHATML."""


@dataclass(frozen=True)
class Wanted:
    """A question, and what transformers makes of it."""

    asked: str
    """A prompt, or what the user says."""
    prompt_ids: list[int]
    token_ids: list[int]
    """The greedy answer, with the token that ended it."""
    end_id: int
    """The token that ended it; -1 if its length did."""
    text: str
    """Of the answer."""


@dataclass(frozen=True)
class FamilyCheckpoint:
    tiny: TinyCheckpoint
    tokenizer: Any
    """transformers' own, read from the folder."""
    style: Style

    @property
    def folder(self) -> Path:
        return self.tiny.folder

    def completion(self, max_tokens: int) -> Wanted:
        """A prompt and its continuation. Raises NearTie if every one depends on rounding."""
        return self._wanted(max_tokens, "Once upon {} dogs,", lambda asked: self.tokenizer(asked)["input_ids"])

    def chat(self, max_tokens: int) -> Wanted:
        """What one user says, and the answer; of styles with a template. Raises NearTie."""
        return self._wanted(max_tokens, "Tell story {}.", self._chat_ids)

    def _chat_ids(self, asked: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, tokenize=False
        )
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def _wanted(self, max_tokens: int, form: str, encode: Callable[[str], list[int]]) -> Wanted:
        for number in range(NUM_TRIES):
            asked = form.format(number)
            prompt_ids = encode(asked)
            try:
                token_ids = self.tiny.expected(prompt_ids, max_tokens)
            except NearTie:
                continue
            is_end = token_ids[-1] in self.tiny.model.config.eos_token_id
            return Wanted(asked, prompt_ids, token_ids, token_ids[-1] if is_end else -1, self._text(token_ids))
        raise NearTie

    def _text(self, token_ids: list[int]) -> str:
        """Of an answer behind its prompt. The tokenizer's own decoder takes a space off its beginning where tokens are
        pieces, and makes all bytes U+FFFD that stand beside one that is no UTF-8."""
        if not self.style.pieces:
            text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return text
        pieces = (self.tokenizer.convert_ids_to_tokens(each) for each in token_ids if each not in self._special_ids)
        return b"".join(map(_bytes_of_piece, filter(None, pieces))).decode(errors=EACH_BYTE)

    @property
    def _special_ids(self) -> set[int]:
        return {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}


def _bytes_of_piece(piece: str) -> bytes:
    byte = re.fullmatch("<0x(..)>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()


def write_family(folder: Path, architecture: str, seed: int = 0) -> FamilyCheckpoint:
    """Write a checkpoint to `folder`: in float32, of sizes drawn by the seed that layers in C++ take."""
    style = STYLES.get(architecture, CHATML)
    tokenizer = _tokenizer(style)
    config = _draw_with_all_kinds(architecture, seed)
    _set_vocabulary(config, len(tokenizer) + NUM_UNNAMED)
    config.max_position_embeddings = MAX_LENGTH
    config.eos_token_id = tokenizer.convert_tokens_to_ids(list(style.ends))
    config.bos_token_id = tokenizer.bos_token_id
    config.pad_token_id = config.eos_token_id[-1]
    tiny = write_checkpoint(folder, config, seed, torch.float32)
    tokenizer.save_pretrained(folder)
    return FamilyCheckpoint(tiny, PreTrainedTokenizerFast.from_pretrained(folder), style)


def write_for_default(folder: str, architecture: str) -> None:
    """Write a checkpoint with the default model's tokenizer, template and limits to `folder`, for requests that are
    made for it."""
    config = _draw_with_all_kinds(architecture, 0)
    default = AutoConfig.from_pretrained(DEFAULT)
    _set_vocabulary(config, default.vocab_size)
    for name in ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(default, name))
    config.intermediate_size = 128  # which every format of quantised weights takes
    write_checkpoint(Path(folder), config, 0, torch.float32)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEFAULT / name, folder)


def _set_vocabulary(config: PreTrainedConfig, size: int) -> None:
    config.vocab_size = size
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = size


def _draw_with_all_kinds(architecture: str, seed: int) -> PreTrainedConfig:
    """Of sizes that layers in C++ take, with a layer of each kind that the family has."""
    options = OPTIONS[architecture]
    wanted = {key: set(options[key]) for key in KINDS_OF_LAYERS if key in options}
    drawn = (draw_config(architecture, seed + 1000 * number, is_wide=True) for number in itertools.count())
    return next(config for config in drawn if all(set(getattr(config, key)) == wanted[key] for key in wanted))


def _tokenizer(style: Style) -> Any:
    special = [*filter(None, [style.begin]), *style.ends, *style.more]
    backend = _pieces(style.prefix, special) if style.pieces else _merged_bytes(special)
    if style.begin:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{style.begin} $A", special_tokens=[(style.begin, backend.token_to_id(style.begin))]
        )
    own = {"bos_token": style.begin} if style.begin else {}
    template = SHAPES[style.shape].source if style.shape else None
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=style.ends[0],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **own,
    )


def _merged_bytes(special: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=special,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _pieces(prefix: str, special: list[str]) -> tokenizers.Tokenizer:
    letters = sorted({"▁", *"".join(CORPUS).replace(" ", "▁")})
    names = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁a", "▁t", "og", "▁d"]
    merges = [("▁", "a"), ("▁", "t"), ("o", "g"), ("▁", "d")]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    spaces: list[Any] = [normalizers.Prepend(prefix)] if prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    backend.add_special_tokens(special)
    return backend
