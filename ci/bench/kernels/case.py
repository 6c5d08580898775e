"""What a bench case is: one operation at one shape, with its goal, its least cost, and the peers that do the same.

A family's file `ci/bench/kernels/<family>.py` gives `cases(tiny)`. An example, whole:

    def _inputs(tokens: int, width: int, device: torch.device, i: int) -> tuple[Tensor]:
        generator = torch.Generator(device).manual_seed(i)
        return (torch.randn(tokens, 2 * width, generator=generator, device=device).to(float_dtype(device)),)

    def cases(tiny: bool) -> list[Case]:
        tokens, width = (5, 48) if tiny else (16384, 14336)
        return [
            Case(
                kernel="K9",
                title="SwiGLU 16k x 14336 bf16",
                goal=Goal("at least 93 % of the bandwidth, no slower than Liger", fraction=0.93, ratios={"Liger": 1.0}),
                stretch=Goal("96 %", fraction=0.96),
                make_inputs=partial(_inputs, tokens, width),
                run=lambda inputs: ops.activate_and_mul(*inputs),
                reference=lambda inputs: reference.activate_and_mul(inputs[0].float()),
                tolerance=2e-2,
                bytes=3 * tokens * width * 2,
                formula="3 T I 2 bytes",
                peers={
                    "torch eager": Peer(same_way(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]), on_cpu=True),
                    "Liger": Peer(_liger, needs="liger_kernel"),
                },
                candidates={"activate_and_mul": activate_and_mul.CANDIDATES},
            )
        ]

`tiny=True` asks for the same cases at shapes that triton's interpreter runs in a second or so (use float32 or float16
there: `float_dtype`; the interpreter is wrong in bfloat16); kernels and titles stay the same. Building a case allocates
nothing and imports no peer. Call the launchers of the family's `gpu`, not the public functions, which would choose
torch on a CPU.

Knows nothing of how time is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Any, ...]
# One tensor, or several that are compared one by one.
Result = Tensor | tuple[Tensor, ...]


def float_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where it is compiled; float16 where it is interpreted, for the interpreter computes bfloat16 wrongly."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def same_way(function: Callable[..., Result]) -> Callable[[Inputs], Callable[[], Result]]:
    """The `prepare` of a peer that takes the case's inputs as they are and needs no preparation."""
    return lambda inputs: lambda: function(*inputs)


def as_it_is(result: Any) -> Result:
    """The whole result."""
    whole: Result = result
    return whole


@dataclass(frozen=True)
class Goal:
    """A performance goal. Every given number must be reached; a ratio to a peer that is not installed is not judged."""

    text: str
    # Of the measured roofline: floor / time, where floor = max(bytes / bandwidth, flops / rate).
    fraction: float | None = None
    # At most, for one call.
    microseconds: float | None = None
    # At least, 1e12 operations a second.
    tflops: float | None = None
    # By peer: its time / ours, at least. "best": the fastest peer found.
    ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """Another library's implementation of the same operation, with its best options."""

    # From one set of the case's inputs to a call without arguments. Layouts are changed and plans are made here,
    # outside the measured time; the call is captured in a CUDA graph.
    prepare: Callable[[Inputs], Callable[[], Result]]
    # The module that it needs, such as "flashinfer"; empty: only torch.
    needs: str = ""
    # Whether the dry run can call it.
    on_cpu: bool = False
    # False: its result is not compared (another rounding, another random stream); say why in a comment.
    comparable: bool = True
    # A variant of our own (bf16 instead of fp8, two launches instead of one): a ratio may name it, "best" excludes it.
    own: bool = False


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    # Of the goals' list, "K1" to "K17".
    kernel: str
    # Unique among all cases; names operation and shape.
    title: str
    goal: Goal
    # The i-th set of inputs on a device. Sets are alike but have other values and other memory: they are rotated.
    make_inputs: Callable[[torch.device, int], Inputs]
    # One call of our operation. If it writes to its inputs, a second call must write the same.
    run: Callable[[Inputs], Result]
    # The same in float32 torch on the inputs' device, from another source than the kernel where there is one.
    reference: Callable[[Inputs], Result]
    # Largest difference allowed, both absolute and relative to the reference, in float32.
    tolerance: float
    # What one call must at least read and write, and multiply and add, whoever computes it.
    bytes: int
    formula: str
    flops: int = 0
    # Whose measured matrix rate bounds `flops`: "bf16", "fp8" or "int8".
    rate: str = "bf16"
    stretch: Goal | None = None
    peers: Mapping[str, Peer] = field(default_factory=dict)
    # The same call with deterministic=True, where there is one: its cost becomes a row.
    run_deterministic: Callable[[Inputs], Result] | None = None
    # By operation as `tuned` is asked: the configurations that the tuning script tries on this case.
    candidates: Mapping[str, Sequence[Mapping[str, int]]] = field(default_factory=dict)
    # Cases of one group are judged together, by the geometric means of their fractions, rates and ratios.
    group: str = ""
    # What of a result is compared, if not all of it as it is: such as quantised values times their scales. Applied to
    # our result and the peers'; the reference gives what is compared.
    compared: Callable[[Any], Result] = as_it_is
    # False: the result is random or chosen among equals, so that only `check` (below) can judge it.
    comparable: bool = True
    # A judgement of its own instead of, or beside, the comparison: raises AssertionError for a wrong result.
    check: Callable[[Inputs, Result], None] | None = None
