"""What a run on a GPU is expected to find, from a model of a step that was written down before any such run.

A step of decodes takes, on the GPU,

    max(weights read / (REACHED x bandwidth), operations / (MATRIX_REACHED x matrix rate))
      + keys and values read / (REACHED x bandwidth) + launches x the gap between two launches

and on the host the work of scheduling and results, and that of launching. The two overlap, so the longer one counts. A
replayed graph takes the host as long whatever it launches; without graphs every launch takes its time. Steps with
prompts are launched one by one.

The rates are those that ci.bench.kernels.machine measures, in the run itself; README.md has the figures for ASSUMED.
Which figures of a run follow from this, and how, is in ci.bench.gpu.expected.
"""

from __future__ import annotations

from dataclasses import dataclass

from ci.bench.gpu.networks import Network
from ci.bench.rates import Rates

ASSUMED = Rates(copy=3.0e12, read=3.0e12, bf16=700e12, fp8=1300e12, int8=1300e12, replay_us=6.0, launch_us=1.5)
"""Of an H100 SXM: 0.9 and 0.7 of the 3.35 TB/s, 989 and 1,979 TFLOP/s of its data sheet; the times are guesses."""
ASSUMED_BYTES = 85e9
"""Of its memory."""
REACHED = 0.93
"""Of the measured bandwidth, by kernels that only read: the guess of ci/bench/NOTES.md."""
MATRIX_REACHED = 0.8
"""Of the measured rate of products of 8192^3, by the narrower ones of a network. A guess."""

DECODE_LAUNCHES = PREFILL_LAUNCHES = 9
"""Launches of a step in each layer, with cuBLAS for the linear ones. A test counts these and the next on a GPU that
computes nothing. Where the tuned table of a device chooses own kernels for up to 64 tokens, a decode has one less: the
table is not there on the first run."""
QUANTIZING_LAUNCHES = 1
"""More in each layer with fp8 weights: that of what attention gives; norms and activations quantise in their own."""
EXPERTS_LAUNCHES = 2
"""More in each layer with experts: router, choice, gate and up with the activation, down and sum take the place of gate
and up, activation and down."""
UNSORTED_SHARE, SORTED_AT_ONCE = 0.25, 512
"""Pairs of a token and one of its experts are sorted before, in one launch, and in three if there are more than
SORTED_AT_ONCE of them; in none if there are at most UNSORTED_SHARE as many as experts."""
DECODE_OUTSIDE, PREFILL_OUTSIDE = 5, 28
"""Outside the layers, of a greedy step. A decode in which a row begins a block has one more."""

HOST_US, HOST_US_OF_ROW = 57.0, 3.2
"""Scheduling, input and results of a step, and of each of its rows: `make bench-host`, 2026-11-23, 60, 150 and 840 to
890 us at batch 1, 32 and 256 on a core of an Intel Xeon."""
REPLAY_HOST_US = 100.0
"""Of launching a step's graphs and copies: the guess of ci.bench.host_work."""
LAUNCH_HOST_US = 45.0
"""Of one launch from Python: 14 to 20 ms a step for 334, under a driver that launches nothing, on 2 cores of a Xeon. A
product of cuBLAS takes less, so this is the most."""

COLD_SECONDS, WARM_SECONDS = 80.0, 25.0
"""Until an engine is ready: with every kernel to compile, 84 of them, which take a third of a second to two each on a
core of a Xeon, and with none. Guesses."""
FLASH_REACHED, SDPA_REACHED = 0.26, 0.05
"""Of the floor, by continuous batching of transformers, with a flash attention and with torch's: 1,118 tokens/s of an
8B at batch 32 on an H200 (Hugging Face's blog, continuous_async), and their ratio in transformers#42839."""
VLLM_REACHED = 0.72
"""The same by vLLM 0.30: 6.9 ms a step of Qwen3-8B on an H100, alone, 18 at batch 256 (silybench-data)."""
DRAFTS = 8
"""Of a step of prompt lookup, its default; all are right where the output copies its prompt."""
STEP_TOKENS = 8192
"""Of a step of prompts, the default on a GPU."""
STEP_BYTES = 4e9
"""Of a GPU's memory, by steps and graphs of an 8B. A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Predicted microseconds."""

    work_us: float
    """In which a kernel runs."""
    gaps_us: float
    """Between them."""
    host_us: float

    @property
    def gpu_us(self) -> float:
        return self.work_us + self.gaps_us

    @property
    def wall_us(self) -> float:
        """From one step to the next."""
        return max(self.gpu_us, self.host_us)

    @property
    def idle(self) -> float:
        """Share of the time in which the GPU waits for the host."""
        return 1.0 - self.gpu_us / self.wall_us

    @property
    def without_kernel(self) -> float:
        """Share of the time in which no kernel runs."""
        return 1.0 - self.work_us / self.wall_us


@dataclass(frozen=True, slots=True)
class Model:
    network: Network
    rates: Rates

    # -- steps of decodes ----------------------------------------------------------------------------------------------

    def step(self, batch: int, context: float, *, graphs: bool = True) -> Step:
        """Of `batch` rows, each behind `context` tokens."""
        operations_us = 1e6 * 2 * batch * self.network.num_active / (MATRIX_REACHED * self._matrix_rate)
        caches_us = batch * self._cache_us(context)
        launches = self.decode_launches(batch)
        return Step(
            work_us=max(self._weights_us(batch), operations_us) + caches_us,
            gaps_us=launches * self.rates.launch_us,
            host_us=HOST_US + HOST_US_OF_ROW * batch + (REPLAY_HOST_US if graphs else launches * LAUNCH_HOST_US),
        )

    def floor_us(self, batch: int, context: float) -> float:
        """Of the bytes alone, at the full bandwidth."""
        caches = batch * context * self.network.token_cache_bytes
        return 1e6 * (self.network.read_bytes(batch) + caches) / self.rates.bandwidth

    def decode_launches(self, batch: int) -> int:
        """Of a greedy step, copies left out."""
        return DECODE_OUTSIDE + self.network.num_layers * (DECODE_LAUNCHES + self._further_launches(batch))

    def prefill_launches(self, num_tokens: int) -> int:
        """The same of a step of prompts."""
        return PREFILL_OUTSIDE + self.network.num_layers * (PREFILL_LAUNCHES + self._further_launches(num_tokens))

    # -- prompts and whole requests ------------------------------------------------------------------------------------

    def prefill_us(self, num_tokens: int) -> float:
        """Of a step of one prompt, or of several that are short beside a network's width."""
        operations_us = 1e6 * 2 * num_tokens * self.network.num_active / (MATRIX_REACHED * self._matrix_rate)
        launches = self.prefill_launches(num_tokens)
        gpu_us = max(operations_us, self._weights_us(num_tokens)) + launches * self.rates.launch_us
        return max(gpu_us, HOST_US + launches * LAUNCH_HOST_US)

    def output_rate(self, batch: int, prompt: float, output: float, *, reached: float | None = None) -> float:
        """Output tokens per second of a full batch. `reached`: of the floor, by another engine's steps of decodes."""
        context = prompt + output / 2
        step_us = self.step(batch, context).wall_us if reached is None else self.floor_us(batch, context) / reached
        prompt_us = self.prefill_us(STEP_TOKENS) / STEP_TOKENS * prompt / output
        return 1e6 / (step_us / batch + prompt_us)

    def output_ceiling(self, prompt: float, output: float) -> float:
        """The same of a batch without end, at the full rates: weights cost nothing."""
        product = 2 * self.network.num_active / self._matrix_rate
        caches = (prompt + output / 2) * self.network.token_cache_bytes / self.rates.bandwidth
        return 1.0 / (caches + product * (1 + prompt / output))

    def fitting_batch(self, gpu_bytes: float, num_tokens: int, most: int) -> int:
        """Rows of `num_tokens`, at most `most`, whose keys and values fit beside the weights."""
        left = 0.9 * (gpu_bytes - self.network.held_bytes - STEP_BYTES)
        return max(min(int(left / self.network.token_cache_bytes / num_tokens), most), 1)

    def prefill_ceiling(self) -> float:
        """Prompt tokens per second of products at the full rate, without attention."""
        return self._matrix_rate / (2 * self.network.num_active)

    def _weights_us(self, num_tokens: int) -> float:
        return 1e6 * self.network.read_bytes(num_tokens) / (REACHED * self.rates.bandwidth)

    def _further_launches(self, num_tokens: int) -> int:
        """Of each layer, beside those of one with a dense MLP in bfloat16."""
        quantizing = QUANTIZING_LAUNCHES if self.network.weight_bytes == 1 else 0
        if not self.network.num_experts:
            return quantizing
        pairs = num_tokens * self.network.num_chosen
        if pairs <= UNSORTED_SHARE * self.network.num_experts:
            return quantizing + EXPERTS_LAUNCHES
        return quantizing + EXPERTS_LAUNCHES + (1 if pairs <= SORTED_AT_ONCE else 3)

    @property
    def _matrix_rate(self) -> float:
        return self.rates.fp8 if self.network.weight_bytes == 1 else self.rates.bf16

    def _cache_us(self, context: float) -> float:
        return 1e6 * context * self.network.token_cache_bytes / (REACHED * self.rates.bandwidth)
