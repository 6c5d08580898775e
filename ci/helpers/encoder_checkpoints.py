"""Tiny encoders of random weights, each with transformers' own network of them; and one GptManager over such a one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_checkpoints import fill_with_noise

from inflight.batch_manager.callbacks import Callbacks
from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.executor.rank.assembly import make_manager
from inflight.output_config import SCORES, AdditionalModelOutput, OutputConfig, Pooling
from inflight.request import Request
from inflight.result import Array, Result
from inflight.runtime.model_runner import ModelRunner
from inflight.scheduler_output import HIDDEN_STATES

VOCAB_SIZE, MAX_POSITIONS = 96, 48
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "num_labels": 3,
}
BEHIND_PADDING: dict[str, Any] = {"max_position_embeddings": MAX_POSITIONS + 2, "pad_token_id": 1}
PADDING: dict[str, Any] = {"pad_token_id": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "Bert": {"hidden_act": ["gelu", "relu", "gelu_new"], "type_vocab_size": [2, 3]},
    "Roberta": {**BEHIND_PADDING, "hidden_act": ["gelu", "relu"], "type_vocab_size": [1]},
    "XLMRoberta": {**BEHIND_PADDING, "type_vocab_size": [1, 2], "layer_norm_eps": [1e-5, 1e-12]},
    "MPNet": {**BEHIND_PADDING, "relative_attention_num_buckets": 32, "layer_norm_eps": [1e-5, 1e-12]},
    "Camembert": {**BEHIND_PADDING, "type_vocab_size": [1, 2]},
    "DistilBert": {"activation": ["gelu", "relu"]},
    "Electra": {"embedding_size": 64, "type_vocab_size": [2, 3], "hidden_act": ["gelu", "relu"]},
    "Ernie": {"type_vocab_size": [2, 4], "hidden_act": ["gelu", "relu"]},
    "NomicBert": {"type_vocab_size": [1, 2], "hidden_act": ["silu", "gelu"], "rope_parameters": {"rope_theta": 1000.0}},
    "JinaEmbeddingsV3": {**PADDING, "type_vocab_size": [1, 2], "rope_parameters": {"rope_theta": 500.0}},
    "DebertaV2": {
        "relative_attention": True,
        "share_att_key": True,
        "pos_att_type": [["c2p", "p2c"], ["p2c"], ["c2p"]],
        "position_buckets": [8, 16, -1],
        "norm_rel_ebd": ["layer_norm", "none"],
        "position_biased_input": [False, True],
        "type_vocab_size": [0, 2],
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": 64,
    },
    "EuroBert": {
        "num_key_value_heads": [1, 2],
        "attention_bias": [False, True],
        "mlp_bias": [False, True],
        "classifier_pooling": ["bos", "mean"],
        **PADDING,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "mask_token_id": 0,
    },
    "ModernBert": {
        "global_attn_every_n_layers": [2, 3],
        "local_attention": [4, 8],
        "classifier_pooling": ["cls", "mean"],
        "attention_bias": [False, True],
        "norm_bias": [False, True],
        "mlp_bias": [False, True],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}
"""Of each family: options, or lists of which one is drawn."""
KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification")
CLASSES = [family + kind for family in OPTIONS for kind in KINDS]


@dataclass(frozen=True)
class TinyEncoder:
    folder: Path
    model: Any
    """In float32."""

    @torch.inference_mode()
    def states(self, token_ids: list[int], second_text_start: int = 0) -> Array:
        """Hidden states behind each token, (tokens, features), by transformers."""
        body = self.model.base_model
        found: Array = body(**self._inputs(token_ids, second_text_start)).last_hidden_state[0].float().numpy()
        return found

    @torch.inference_mode()
    def scores(self, token_ids: list[int], second_text_start: int = 0) -> Array:
        """(labels,), by transformers."""
        found: Array = self.model(**self._inputs(token_ids, second_text_start)).logits[0].float().numpy()
        return found

    def _inputs(self, token_ids: list[int], second_text_start: int) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": torch.tensor([token_ids])}
        if getattr(self.model.config, "type_vocab_size", 1) > 1:
            first = second_text_start or len(token_ids)
            inputs["token_type_ids"] = torch.tensor([[int(place >= first) for place in range(len(token_ids))]])
        return inputs


def write_encoder(
    folder: Path, name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> TinyEncoder:
    """A checkpoint of transformers' class `name`, whose options are drawn by `seed`; `options`: in place of these."""
    draw = random.Random(f"{name}{seed}")
    family = next(each for each in sorted(OPTIONS, key=len, reverse=True) if name.startswith(each))
    drawn = {key: draw.choice(value) if isinstance(value, list) else value for key, value in OPTIONS[family].items()}
    sizes = {**SIZES, "hidden_dim": SIZES["intermediate_size"]} if family == "DistilBert" else SIZES
    config = getattr(transformers, f"{family}Config")(**{**sizes, **drawn, **options})
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config).to(dtype).eval()
    fill_with_noise(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    return TinyEncoder(folder, model.float())


def token_ids(length: int, seed: int = 0) -> list[int]:
    """Of a random text without padding."""
    return [random.Random(f"{length} {seed} {place}").randrange(4, VOCAB_SIZE) for place in range(length)]


def vector_request(
    request_id: int, ids: list[int], pooling: Pooling = "mean", *, first: int = 0, **options: Any
) -> Request:
    """`first`: see AdditionalModelOutput."""
    output = AdditionalModelOutput(name=HIDDEN_STATES, pooling=pooling, first=first)
    return _request(request_id, ids, output, **options)


def states_request(request_id: int, ids: list[int], **options: Any) -> Request:
    return _request(request_id, ids, AdditionalModelOutput(name=HIDDEN_STATES, gather_context=True), **options)


def scores_request(request_id: int, ids: list[int], **options: Any) -> Request:
    return _request(request_id, ids, AdditionalModelOutput(name=SCORES), **options)


def _request(request_id: int, ids: list[int], output: AdditionalModelOutput, **options: Any) -> Request:
    config = OutputConfig(additional_model_outputs=[output])
    return Request(request_id=request_id, input_token_ids=ids, max_tokens=0, output_config=config, **options)


class EncoderEngine:
    """One GptManager over a real network in this process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """`options`: of the EngineConfig."""
        sizes = {"max_batch_size": 8, "max_num_tokens": 64, "tokens_per_block": 4, "num_threads": 1}
        self.config = EngineConfig(
            gpt_model_path=str(folder), **{"device": "cpu", "cpu_compile": "false", **sizes, **options}
        ).for_device("cpu")
        self.runner = ModelRunner.load(self.config, SingleRank())
        self._queue: list[Request] = []
        self.results: dict[int, Result | str] = {}
        """Or the sentence of an error."""
        self.steps: list[int] = []
        """Tokens of each."""
        callbacks = Callbacks(
            get_inference_requests=self._get,
            send_response=self._send,
            step_ended=lambda step, _: self.steps.append(sum(work.num_tokens for work in step.rows)),
        )
        self.manager = make_manager(self.config, self.runner, callbacks, raise_on_step_failure=True)

    def _get(self, most: int) -> list[Request]:
        taken, self._queue = self._queue[:most], self._queue[most:]
        return taken

    def _send(self, request_id: int, result: Result | None, is_final: bool, error: Exception | None) -> None:
        assert is_final, "one answer for each"
        assert request_id not in self.results, "one answer for each"
        self.results[request_id] = str(error) if result is None else result

    def run(self, requests: list[Request]) -> dict[int, Result | str]:
        """All at once; what each has got."""
        self._queue, self.results, self.steps = list(requests), {}, []
        while len(self.results) < len(requests):
            self.manager.step()
        return self.results

    def tensor(self, request: Request, *beside: Request) -> Array:
        """The only one that a request asks for, of those that run at once the first."""
        result = self.run([request, *beside])[request.request_id]
        assert isinstance(result, Result), result
        assert result.output_token_ids == []
        (tensor,) = result.tensors
        return np.array(tensor.array())

    def close(self) -> None:
        self.runner.close()
