"""Tensors that one sequence asked for, as its steps bring them, until a Result takes them along. numpy, no torch."""

from __future__ import annotations

import numpy as np

from inflight.batch_manager.pooled_rows import PooledRows
from inflight.output_config import SCORES, AdditionalModelOutput, OutputConfig
from inflight.result import NamedTensor
from inflight.scheduler_output import (
    CONTEXT,
    GENERATION_LOGITS,
    POOLED,
    PROMPT_LOG_PROBS,
    PROMPT_TOP_LOG_PROBS,
    TOP_LOG_PROBS,
    Array,
    RowTensors,
)


class GatheredTensors:
    """Of a sequence that asks for any.

    A sequence that was paused computes its prompt again, and steps of before the pause may still come in: what is of
    prompt tokens that are known already is dropped.
    """

    __slots__ = (
        "_generated",
        "_needs_scores",
        "_num_prompt_gathered",
        "_num_prompt_tokens",
        "_of_prompt",
        "_of_samples",
        "_pooled",
        "_prompt",
    )

    def __init__(
        self,
        of_prompt: tuple[str, ...],
        of_samples: tuple[str, ...],
        num_prompt_tokens: int,
        pooled: dict[str, PooledRows],
    ) -> None:
        """Names of the outputs that are wanted of the prompt's tokens and of the generated ones. `pooled`: by name,
        those of the first that one row is made of."""
        self._pooled = pooled
        self._of_prompt = tuple(name for name in of_prompt if name != SCORES)
        self._of_samples = of_samples
        self._needs_scores = SCORES in of_prompt
        """Which come with the prompt's last token, whichever others are in the cache."""
        self._num_prompt_tokens = num_prompt_tokens if self._of_prompt else 0
        self._num_prompt_gathered = 0
        self._prompt: dict[str, list[Array]] = {}
        self._generated: dict[str, list[Array]] = {}

    @classmethod
    def wanted_by(cls, config: OutputConfig, num_prompt_tokens: int, *, with_prompt: bool) -> GatheredTensors | None:
        """None if `config` asks for nothing. `with_prompt`: False for a sequence whose prompt another one answers for,
        or whose client has had that part before the ranks were lost."""
        of_prompt, of_samples = output_names(config)
        if not with_prompt:
            of_prompt = ()
        rows = {
            name: PooledRows(each.pooling, each.first)
            for each in config.additional_model_outputs
            if each.pooling and (name := f"{CONTEXT}{each.name}") in of_prompt
        }
        return cls(of_prompt, of_samples, num_prompt_tokens, rows) if of_prompt or of_samples else None

    @property
    def needs_prompt(self) -> bool:
        """Whether tokens of the prompt must still be computed for what is asked of them."""
        return self._num_prompt_gathered < self._num_prompt_tokens

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what is still to be asked of the runner."""
        of_prompt = self._of_prompt if self.needs_prompt else ()
        return (*of_prompt, *((SCORES,) if self._needs_scores else ()), *self._of_samples)

    def add_prompt(self, tensors: RowTensors) -> None:
        """Take in what a step found of the prompt."""
        if self._needs_scores and SCORES in tensors.prompt:
            self._prompt[SCORES] = [tensors.prompt[SCORES]]
            self._needs_scores = False
        known = self._num_prompt_gathered - tensors.prompt_start
        if not 0 <= known < tensors.num_prompt_tokens:
            return
        for name, array in tensors.prompt.items():
            if name == SCORES:
                continue
            if name in self._pooled:
                self._pooled[name].add(array[known:])
            else:
                self._prompt.setdefault(name, []).append(array[known:])
        self._num_prompt_gathered += tensors.num_prompt_tokens - known

    def add_generated(self, tensors: RowTensors, num_tokens: int) -> None:
        """Take in what a step found of the tokens that it sampled, the first `num_tokens` of which were kept."""
        for name, array in tensors.generated.items():
            self._generated.setdefault(name, []).append(array[:num_tokens])

    def take(self) -> list[NamedTensor]:
        """All that no earlier Result had; of the prompt once it is complete, or with the last Result."""
        found = {**self._prompt, **self._generated}
        self._prompt, self._generated = {}, {}
        if self._pooled and not self.needs_prompt:
            found |= {name.replace(CONTEXT, POOLED, 1): [rows.pooled()] for name, rows in self._pooled.items()}
            self._pooled = {}
        return [NamedTensor.of(name, _joined(arrays)) for name, arrays in sorted(found.items())]


def _joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _name_of_prompt(output: AdditionalModelOutput) -> str:
    """Scores are of a prompt alone."""
    return SCORES if output.name == SCORES else f"{CONTEXT}{output.name}"


def output_names(config: OutputConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the outputs that a runner must give: of the prompt's tokens, of the sampled ones."""
    of_prompt = {
        PROMPT_LOG_PROBS: config.return_prompt_log_probs,
        PROMPT_TOP_LOG_PROBS: config.return_prompt_log_probs and config.num_log_probs > 0,
        f"{CONTEXT}logits": config.return_context_logits,
        **{_name_of_prompt(output): output.is_of_prompt for output in config.additional_model_outputs},
    }
    of_samples = {
        TOP_LOG_PROBS: config.num_log_probs > 0,
        GENERATION_LOGITS: config.return_generation_logits,
        **{output.name: output.pooling is None and output.name != SCORES for output in config.additional_model_outputs},
    }
    return tuple(n for n, wanted in of_prompt.items() if wanted), tuple(n for n, wanted in of_samples.items() if wanted)
