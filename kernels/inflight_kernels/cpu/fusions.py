"""Joins the recorded operations that C++ computes together: rules that rewrite the list of them.

A rule looks at one operation, and at where else the values that it reads and writes are used. So it does not matter
what was recorded in between, and what no rule fits stays as it is. No rule changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from inflight_kernels.cpu.draft import Draft
from inflight_kernels.cpu.operations import (
    Activate,
    ActivateAndMul,
    AddDelta,
    GatedLinear,
    Gather,
    Linear,
    NormOfSum,
    Operation,
    Permute,
    RmsNorm,
    Sum,
)
from inflight_kernels.cpu.recorded_values import STEP, Unsupported
from inflight_kernels.cpu.recording import NOWHERE, Bias, Columns, Recording, Weight

Rule = Callable[[Draft, int], None]
"""Rewrites the operation at a place together with earlier ones, where it fits."""

EXCHANGES = (Sum, Gather, NormOfSum)
"""In which ranks meet."""


def fuse(recording: Recording) -> Recording:
    """The same network in fewer operations. Raises Unsupported."""
    draft = Draft(recording)
    for rule in RULES:
        apply(rule, draft)
    fused = draft.recording()
    for operation in fused.operations:
        if operation.kind in (Linear, GatedLinear) and (num_inputs := operation.weight("weight").num_inputs) % STEP:
            raise Unsupported(f"a linear layer has {num_inputs} inputs, which is not a multiple of {STEP}")
    return fused


def apply(rule: Rule, draft: Draft) -> None:
    """Wherever it fits, from the end on: a norm of a sum over ranks looks at the norms behind it."""
    for place in sorted(draft.operations, reverse=True):
        if draft.kinds([place]) == [RULES[rule]]:
            rule(draft, place)


def read_padding(draft: Draft, place: int) -> None:
    """A linear layer of all that an activation, or another order of columns, puts out reads the zeros behind it as
    well."""
    linear = draft.operations[place]
    x = linear.value("x")
    first = draft.uses[x.buffer][0]
    if draft.kinds([first])[0] not in (Activate, ActivateAndMul, Permute):
        return
    before, weight = draft.operations[first], linear.weight("weight")
    if before.value("out") == x and before.number("size") == weight.num_inputs:
        draft.put(place, linear.changed(weight=replace(weight, num_inputs=draft.width_of(x))))


def join_adapters(draft: Draft, place: int) -> None:
    """A linear layer adds the deltas of its adapters, if nothing uses its result before."""
    addition = draft.operations[place]
    result = addition.value("x")
    uses = draft.uses[result.buffer]
    before = uses[uses.index(place) - 1]
    if draft.kinds([before]) != [Linear]:
        return
    linear = draft.operations[before]
    is_whole = linear.value("out") == result and linear.number("num_outputs") == addition.number("size")
    # The layer moves behind the deltas, so its input must still be there.
    keeps_input = not any(before < writer < place for writer in draft.writers(linear.value("x").buffer))
    if is_whole and keeps_input and linear.value("delta") == NOWHERE:
        draft.remove(before)
        draft.put(place, linear.changed(delta=addition.value("delta")))


def join_activation(draft: Draft, place: int) -> None:
    """A linear layer computes activate_and_mul of its whole result, if nothing else uses that."""
    activation = draft.operations[place]
    gate_up, out, size = activation.value("x"), activation.value("out"), activation.number("size")
    uses = draft.uses[gate_up.buffer]
    if draft.kinds(uses) != [Linear, ActivateAndMul]:
        return
    before = uses[0]
    linear = draft.operations[before]
    if linear.value("out") != gate_up or linear.number("num_outputs") != 2 * size:
        return
    weights = {name: value for name, value in linear.fields.items() if isinstance(value, Weight | Bias)}
    draft.remove(place)
    draft.put(
        before,
        linear.changed(
            GatedLinear,
            **{name: replace(weight, gated=True) for name, weight in weights.items()},
            out=out,
            # Of joined weights both halves are padded, and f(0) * 0 = 0.
            num_outputs=draft.width_of(out),
            num_deltas=size,
            activation=activation.fields["activation"],
        ),
    )


def join_sum(draft: Draft, place: int) -> None:
    """A norm of a residual and a linear layer's result, summed over the ranks, reads every rank's result where it lies,
    if nothing else uses it.

    Of many rows a rank then has all of the norm, but only some of the sum with the residual. So that may only be read
    as the residual of such a norm again, or be the network's result, in the place of a norm that nothing uses.
    """
    norm = draft.operations[place]
    x, out, total = (norm.value(name) for name in ("x", "out", "sum"))
    uses = draft.uses[x.buffer]
    if total == NOWHERE or draft.kinds(uses) != [Linear, Sum, RmsNorm]:
        return
    linear, summed, _ = uses
    # The norm is of all columns of the sum, and of another residual than the sum itself.
    is_whole = draft.operations[summed].number("size") == norm.number("size")
    is_other = norm.value("residual").buffer != x.buffer
    # Other ranks read the results of one norm while this rank computes those of the next: it must not come further.
    meets_once = sum(kind in EXCHANGES for kind in draft.kinds(range(linear, place))) == 1
    # `out` is memory that all ranks share.
    is_kept = draft.writers(out.buffer) == [place]
    readers = draft.kinds(draft.uses[total.buffer][1:])
    is_residual = all(kind is NormOfSum for kind in readers)
    is_result = readers == [None] and draft.uses[out.buffer] == [place]
    if not (is_whole and is_other and meets_once and is_kept and (is_residual or is_result)):
        return
    draft.remove(summed)
    draft.put(place, norm.changed(NormOfSum, **{"weight": None} if is_result else {}))
    if is_result:
        draft.end_with(Columns(out.buffer, draft.output.start))


RULES: dict[Rule, type[Operation]] = {
    read_padding: Linear,
    join_adapters: AddDelta,
    join_activation: ActivateAndMul,  # of a layer and its adapters
    join_sum: RmsNorm,
}
"""Rule -> the operation that it looks at, in the order in which they are applied."""
