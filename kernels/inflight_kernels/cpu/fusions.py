"""Joins the recorded operations that C++ computes together: rules that rewrite the list of them.

A rule looks at one operation, and at where else the values that it reads and writes are used. So it does not matter
what was recorded in between, and what no rule fits stays as it is. No rule changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from inflight_kernels.cpu.operations import GatedLinear, Gather, Linear, NormOfSum, Operation, RmsNorm, Sum
from inflight_kernels.cpu.recorded_values import STEP, Unsupported
from inflight_kernels.cpu.recording import NOWHERE, AddDelta, Columns, Recording, SiluAndMul, Weight

Rule = Callable[[Recording, int], Recording | None]
"""Rewrites the operation at a place, together with earlier ones; None where it does not fit."""

EXCHANGES = (Sum, Gather, NormOfSum)
"""In which ranks meet."""
PARTS: dict[type[Operation], str] = {
    SiluAndMul: "C++ computes silu_and_mul only of the whole result of a linear layer",
    AddDelta: "C++ adds adapters to the whole result of a linear layer only",
}
"""Operation that C++ has as a part of another alone -> the reason where it was not joined."""


def fuse(recording: Recording) -> Recording:
    """The same network in operations that C++ has. Raises Unsupported."""
    for rule in RULES:
        # Backwards: what rules remove lies before the place, and `join_sum` looks at the norms behind it.
        for place in reversed(range(len(recording.operations))):
            recording = rule(recording, place) or recording
    for operation in recording.operations:
        if operation.kind in PARTS:
            raise Unsupported(PARTS[operation.kind])
        if operation.kind in (Linear, GatedLinear) and (num_inputs := operation.number("num_inputs")) % STEP:
            raise Unsupported(f"a linear layer has {num_inputs} inputs, which is not a multiple of {STEP}")
    return recording


def read_padding(recording: Recording, place: int) -> Recording | None:
    """A linear layer of all that silu_and_mul puts out reads the zeros behind it as well."""
    linear = recording.operations[place]
    if linear.kind is not Linear:
        return None
    x = linear.value("x")
    first = recording.uses[x.buffer][0]
    if recording.kinds([first]) != [SiluAndMul]:
        return None
    activation = recording.operations[first]
    if activation.value("out") != x or activation.number("size") != linear.number("num_inputs"):
        return None
    return recording.rewritten({place: linear.changed(num_inputs=recording.widths[x.buffer])})


def join_adapters(recording: Recording, place: int) -> Recording | None:
    """A linear layer adds the deltas of its adapters, if nothing uses its result before."""
    adds = recording.operations[place]
    if adds.kind is not AddDelta:
        return None
    result = adds.value("x")
    uses = recording.uses[result.buffer]
    before = uses[uses.index(place) - 1]
    if recording.kinds([before]) != [Linear]:
        return None
    linear = recording.operations[before]
    is_whole = linear.value("out") == result and linear.number("num_outputs") == adds.number("size")
    # The layer moves behind the deltas, so its input must still be there.
    keeps_input = not any(before < writer < place for writer in recording.writers(linear.value("x").buffer))
    if not is_whole or not keeps_input or linear.value("delta") != NOWHERE:
        return None
    return recording.rewritten({before: None, place: linear.changed(delta=adds.value("delta"))})


def join_activation(recording: Recording, place: int) -> Recording | None:
    """A linear layer computes silu_and_mul of its whole result, if nothing else uses that."""
    activation = recording.operations[place]
    if activation.kind is not SiluAndMul:
        return None
    gate_up, out, size = activation.value("x"), activation.value("out"), activation.number("size")
    uses = recording.uses[gate_up.buffer]
    if recording.kinds(uses) != [Linear, SiluAndMul]:
        return None
    linear = recording.operations[uses[0]]
    if linear.value("out") != gate_up or linear.number("num_outputs") != 2 * size:
        return None
    weights = {name: value for name, value in linear.fields.items() if isinstance(value, Weight)}
    gated = linear.changed(
        GatedLinear,
        **{name: replace(weight, gated=True) for name, weight in weights.items()},
        out=out,
        # Of joined weights both halves are padded, and silu(0) * 0 = 0.
        num_outputs=recording.widths[out.buffer],
        num_deltas=size,
    )
    return recording.rewritten({uses[0]: gated, place: None})


def join_sum(recording: Recording, place: int) -> Recording | None:
    """A norm of a residual and a linear layer's result, summed over the ranks, reads every rank's result where it lies,
    if nothing else uses it.

    Of many rows a rank then has all of the norm, but only some of the sum with the residual. So that may only be read
    as the residual of such a norm again, or be the network's result, in the place of a norm that nothing uses.
    """
    norm = recording.operations[place]
    if norm.kind is not RmsNorm or norm.value("residual") == NOWHERE:
        return None
    x, out, total = (norm.value(name) for name in ("x", "out", "sum"))
    uses = recording.uses[x.buffer]
    if recording.kinds(uses) != [Linear, Sum, RmsNorm]:
        return None
    linear, added, _ = uses
    is_whole = recording.operations[added].number("size") == norm.number("size")
    # Other ranks read the results of one norm while this rank computes those of the next: it must not come further.
    meets_once = sum(kind in EXCHANGES for kind in recording.kinds(range(linear, place))) == 1
    # `out` is memory that all ranks share.
    is_kept = recording.writers(out.buffer) == [place]
    if not (is_whole and meets_once and is_kept):
        return None
    readers = recording.kinds(recording.uses[total.buffer][1:])
    if all(kind is NormOfSum for kind in readers):
        return recording.rewritten({added: None, place: norm.changed(NormOfSum)})
    if readers == [None] and recording.uses[out.buffer] == (place,):
        result = Columns(out.buffer, recording.output.start)
        return recording.rewritten({added: None, place: norm.changed(NormOfSum, weight=None)}, output=result)
    return None


RULES: tuple[Rule, ...] = (read_padding, join_adapters, join_activation, join_sum)
"""In this order: a layer first gets its deltas, of whose sum the activation is."""
