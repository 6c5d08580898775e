"""The operations that a program for CPUs consists of: each field's one declaration.

These are structures of C++ too, see structures.py.

A program has buffers of one row for each token of a step. A value is a range of a buffer's columns. All numbers are of
the program's element type (native/formats.h), unless a field says otherwise.
"""

from __future__ import annotations

import ctypes
import enum

from inflight_kernels.cpu.fields import Fields
from inflight_kernels.cpu.matrix import Matrix

MAX_SLICES = 3
"""Layers with one input that an adapter changes together."""


class Value(ctypes.Structure):
    """Columns of a buffer, from `column` on; how many there are is known from the operation."""

    _fields_ = Fields(("int64_t", "buffer column"))


class CacheFormat(enum.IntEnum):
    """Of stored keys and values: of the program's element type, fp8 (native/formats.h) or whole numbers of 8 bits."""

    ELEMENT = 0
    FP8 = 1
    INT8 = 2


class Cache(ctypes.Structure):
    """One layer's KV cache: two tensors (blocks, block_size, num_kv_heads, head_dim), or one of keys whose first
    elements are the values, so that `values` is where the keys are. Fp8 holds keys / key_scale and values /
    value_scale, divided when they have been rounded to elements, clamped to +-448 and rounded to nearest, ties to even.
    It is read without another rounding: elements have every number of fp8, and the scales multiply scores and
    the result of attention, in float32. No number stays none. Each head of a token in INT8 has a scale of its own
    (native/quantize.h), and what is read is rounded to elements."""

    _fields_ = Fields(
        ("void*", "keys values"),
        ("CacheFormat", "format"),
        ("int64_t", "block_size num_kv_heads head_dim"),
        ("int64_t", "value_dim", "Elements of a value: head_dim, or fewer where they are those of the keys."),
        ("float", "key_scale value_scale", "Of fp8; else 1."),
        ("float*", "key_scales value_scales", "(blocks, block_size, num_kv_heads), of INT8; else null."),
        ("int64_t", "group", "Which of the step's Blocks say where its tokens are."),
    )


class NativeNormWeight(ctypes.Structure):
    """What a norm multiplies with, as many as it has columns: elements, before which the normalised values are rounded,
    or float32 (then only the product is rounded), or, both null, nothing."""

    _fields_ = Fields(("const Element*", "elements"), ("const float*", "floats"))


class Ids(enum.IntEnum):
    """Which number of a token names its row of a table: itself, its position, or its type. Where the batch gives a row
    for a token, TOKEN is that row, and TOKEN_ALONE is not."""

    TOKEN = 0
    POSITION = 1
    TOKEN_ALONE = 2
    TYPE = 3


class Operation(ctypes.Structure):
    """Base of all operations; `kind` is the operation's place in KINDS. One without fields of its own has those of its
    base, and C++ has one structure for both."""

    _fields_ = Fields(("Kind", "kind"))


class Embedding(Operation):
    """out = table[id] * factor; of token ids, or a row that the batch gives, as it is. Of several ranks each holds a
    part of the table, and gives zeros for the ids of other parts; the part that begins with id 0 has the rows that the
    batch gives."""

    _fields_ = Fields(
        (Value, "out"),
        ("const Element*", "table", "(num_rows, size), not packed; its first row is that of id `first`."),
        (Matrix, "codes", "What stands in its place where that is null: (num_rows, size), packed."),
        ("int64_t", "first num_rows size"),
        ("Ids", "ids"),
        ("float", "factor"),
    )


class Sum(Operation):
    """x becomes the sum of every rank's, which is rounded once."""

    _fields_ = Fields((Value, "x", "All `size` columns of its buffer."), ("int64_t", "size"))


class Gather(Operation):
    """out = every rank's x side by side, in rank order."""

    _fields_ = Fields(
        (Value, "x out", "All `size` columns of its buffer, and all of as many for each rank."),
        ("int64_t", "size"),
    )


class Lora(Operation):
    """delta = scale * B (A x) of each token's low-rank adapter: what a linear layer adds to its product. Tokens without
    an adapter are left out, and a batch without any is not looked at."""

    _fields_ = Fields(
        (Value, "x narrow delta", "`narrow`, of num_slices * max_rank columns, takes A x."),
        (
            "const Element*",
            "a b",
            "(slots, num_slices * max_rank, num_inputs) and (slots, max_rank, sum of the widths), not packed.",
        ),
        ("const float*", "scales", "(slots): a factor."),
        ("const int32_t*", "ranks", "(slots): the leading ranks that are not zeros."),
        ("int64_t", "num_inputs max_rank num_slices"),
        (f"int64_t[{MAX_SLICES}]", "widths", "Outputs of each of the layers with the same input, then zeros."),
    )


class AddDelta(Operation):
    """x += delta where a token has an adapter."""

    _fields_ = Fields((Value, "x"), (Value, "delta", "Columns that `Lora` has written."), ("int64_t", "size"))


class Linear(Operation):
    """out = x @ weight.T + bias, plus delta where a token has an adapter."""

    _fields_ = Fields(
        (Value, "x out"),
        (Value, "delta", "Columns that `Lora` has written; buffer -1: none."),
        (Matrix, "weight"),
        ("const Element*", "bias", "(num_outputs), or null."),
        ("int64_t", "num_outputs"),
    )


class GatedLinear(Linear):
    """out = f(gate) * up of a linear layer whose outputs are gate and up, `num_outputs` of each, a multiple of 16.
    Panels of the weight have 16 rows of gate and 16 rows of up. The bias has all of gate before all of up, and so has
    delta, `num_deltas` of each."""

    _fields_ = Fields(("int64_t", "num_deltas"), ("Activation", "activation"))


class HeadLinear(Operation):
    """out = x @ weight.T of each head by itself: its columns of x, and a matrix of its own."""

    _fields_ = Fields(
        (Value, "x out", "Columns of the first head."),
        (Matrix, "weight", "Those of all heads, one after the other."),
        ("int64_t", "num_heads"),
        ("int64_t", "num_outputs", "Of a head."),
        ("int64_t", "x_stride out_stride", "Columns from one head to the next one."),
    )


class Experts(Operation):
    """out = the weighted sum of what the chosen experts of each token compute of x: down (f(gate) * up). moe/routing.py
    says which are chosen, and what their weights are, or the batch does. What is chosen and not among this rank's own
    adds nothing: the batch's count from the first of these on."""

    _fields_ = Fields(
        (Value, "x"),
        (Value, "logits", "Buffer -1: the batch says what is chosen."),
        (Value, "out"),
        (Matrix, "gate_up down", "Of its own experts, each packed as the layers of a feed-forward, gated or not."),
        (
            "const int32_t*",
            "columns inner_columns",
            "(num_own, size) and (num_own, num_inner): which column of x, and of what is activated, each input of an "
            "expert's gate_up and down is; or null: as they are.",
        ),
        ("int64_t", "is_gated", "Whether gate_up is of both; else it is of up, and they compute down f(up)."),
        (
            "const Element*",
            "gate_up_bias",
            "(num_own, 2 * inner_size), of each all of gate before all of up; or null, as without gates.",
        ),
        ("const Element*", "down_bias", "(num_own, size), or null."),
        ("Activation", "activation"),
        ("int64_t", "num_experts num_chosen"),
        ("int64_t", "first_expert num_own", "Those of which this rank has the weights."),
        ("Scores", "scores"),
        ("GroupScore", "group_score"),
        ("int64_t", "num_groups num_chosen_groups"),
        ("const float*", "choice_bias", "(num_experts), added to what is compared; or null."),
        ("int64_t", "renormalizes", "Whether the weights of the chosen ones sum to `scale`."),
        ("float", "epsilon", "Added to the sum of sigmoids that they are divided by."),
        ("float", "scale", "Of the weights."),
        ("const float*", "factors", "(num_experts), of the weight of each, afterwards; or null."),
        ("int64_t", "size", "Of x and out; a multiple of 32."),
        ("int64_t", "inner_size", "Outputs of up and zeros; a multiple of 32."),
        ("int64_t", "num_inner", "Outputs of up."),
    )


class Activate(Operation):
    """out = f(x)."""

    _fields_ = Fields(
        (Value, "x"),
        (Value, "out", "Behind `size` columns it has zeros up to a multiple of 32."),
        ("int64_t", "size"),
        ("Activation", "activation"),
    )


class ActivateAndMul(Activate):
    """out = f(gate) * up. x has all of gate before all of up, `size` of each."""


class Scale(Operation):
    """out = x * factor."""

    _fields_ = Fields((Value, "x out"), ("int64_t", "size"), ("float", "factor"))


class Permute(Operation):
    """out = the columns of x in another order."""

    _fields_ = Fields(
        (Value, "x"),
        (Value, "out", "Behind `size` columns it has zeros up to a multiple of 32."),
        ("const int32_t*", "columns", "(size): which column of x each of out is."),
        ("int64_t", "size"),
    )


class SoftCap(Operation):
    """out = cap * tanh(x / cap)."""

    _fields_ = Fields((Value, "x out"), ("int64_t", "size"), ("float", "cap"))


class Add(Operation):
    """out = x + y."""

    _fields_ = Fields((Value, "x y out"), ("int64_t", "size"))


class Mul(Add):
    """out = x * y."""


class SigmoidMul(Operation):
    """out = x * sigmoid(gate)."""

    _fields_ = Fields((Value, "x gate out"), ("int64_t", "size"), ("int64_t", "gate_size", "Of gate: 1, or as of x."))


class RmsNorm(Operation):
    """sum = x + residual; out = norm(sum) * weight. Without a residual (buffer -1): out = norm(x) * weight, of each of
    some groups of columns by itself."""

    _fields_ = Fields(
        (Value, "x residual out sum"),
        (NativeNormWeight, "weight", "Null for a sum without its norm."),
        ("int64_t", "size", "A multiple of 16."),
        ("float", "eps"),
        ("int64_t", "num_groups", "Of `size` columns each; 1 with a residual."),
    )


class NormOfSum(RmsNorm):
    """Has a residual, and begins with the sum of every rank's x, which each has in its own area, rounded once. Of many
    rows each rank computes some (`Run::splits_rows`): it writes these rows of `out`, which lies in the common area, and
    of `sum`, which only the next one reads, as its residual."""


class RowSquares(Operation):
    """out = the sum of the squares of x, or of x * silu(gate)."""

    _fields_ = Fields(
        (Value, "x"),
        (Value, "gate", "Buffer -1: none."),
        (Value, "out", "A float32, in the place of as many columns as it has the bytes of."),
        ("int64_t", "size", "Of x; a multiple of 16."),
    )


class RmsNormOfPart(Operation):
    """out = norm(x) * weight of some of the columns that are normalised together, with a gate behind the norm or before
    it, as GatedRmsNorm has it, or without one. The parts' squares are added up in their order."""

    _fields_ = Fields(
        (Value, "x"),
        (Value, "gate", "Buffer -1: none; else f is silu."),
        (Value, "squares", "float32, as RowSquares writes them, of all ranks."),
        (Value, "out"),
        (NativeNormWeight, "weight"),
        ("int64_t", "size", "A multiple of 16."),
        ("int64_t", "first_part part_step num_parts", "Which of `squares` are added up."),
        ("int64_t", "num_columns", "Of all parts."),
        ("int64_t", "gate_first"),
        ("float", "eps"),
    )


class LayerNorm(Operation):
    """sum = x + residual; out = norm(sum) * weight + bias. Without a residual (buffer -1): of x."""

    _fields_ = Fields(
        (Value, "x residual out sum"),
        ("const Element*", "weight bias", "(size) each; the bias may be null."),
        ("int64_t", "size", "A multiple of 16."),
        ("float", "eps"),
    )


class RopeAndKvWrite(Operation):
    """Rotates the queries in place and the keys into the cache; copies the values there."""

    _fields_ = Fields(
        (Value, "queries keys values"),
        (Cache, "cache"),
        ("int64_t", "num_heads"),
        ("const float*", "cos_sin", "(positions, rotary_dim): cosines, then sines."),
        ("int64_t", "rotary_dim", "Leading elements of a head that are rotated."),
        ("int64_t", "adjacent_pairs", "Whether elements 2 i and 2 i + 1 are a pair; else i and i + rotary_dim / 2."),
        (NativeNormWeight, "query_norm key_norm", "(head_dim), or null for both."),
        ("float", "norm_eps"),
    )


class Rope(Operation):
    """Rotates the queries in place."""

    _fields_ = Fields(
        (Value, "queries"),
        ("int64_t", "num_heads head_dim"),
        ("const float*", "cos_sin", "As of RopeAndKvWrite, as what follows."),
        ("int64_t", "rotary_dim adjacent_pairs"),
        (NativeNormWeight, "query_norm", "(head_dim), or null."),
        ("float", "norm_eps"),
    )


class RopeAndLatentWrite(Operation):
    """out = the rotated part of each head's query. Normalises a token's latent, rotates the key behind it, both in
    place, and writes them, a key whose first elements are the value, to the cache."""

    _fields_ = Fields(
        (Value, "queries latent out"),
        ("int64_t", "num_heads"),
        ("int64_t", "query_stride out_stride", "Columns from one head to the next one."),
        (Cache, "cache"),
        ("const float*", "cos_sin", "(positions, elements that are rotated): cosines, then sines."),
        ("int64_t", "adjacent_pairs", "As of RopeAndKvWrite."),
        (NativeNormWeight, "norm", "Of the latent, as many as a value has elements."),
        ("float", "norm_eps"),
    )


class Attention(Operation):
    """Attention of some rows over the cache."""

    _fields_ = Fields(
        (Value, "queries out"),
        (Cache, "cache"),
        ("int64_t", "num_heads"),
        ("int64_t", "sliding_window", "Last keys that a token sees, itself included; 0 = all."),
        ("float", "scale"),
        ("float", "soft_cap", "Each score becomes soft_cap * tanh(score / soft_cap); 0 = it stays."),
        ("const float*", "sinks", "(num_heads): one more logit of each head, without a key or value; null = none."),
    )


class DecodeAttention(Attention):
    """Of the decoding rows."""


class PrefillAttention(Attention):
    """Of the prefilling rows."""


class BidirectionalAttention(Operation):
    """Attention of the step's tokens to all of their own sequence, as they stand in the step."""

    _fields_ = Fields(
        (Value, "queries keys values out"),
        ("int64_t", "num_heads num_kv_heads head_dim"),
        ("int64_t", "window", "Tokens before and behind it that a token sees; 0 = all."),
        ("float", "scale"),
        (
            "const float*",
            "bias",
            "(num_heads, bias_size), added to scores, by the distance of a key from its query; the middle one is that "
            "of the query's own; null = none.",
        ),
        ("int64_t", "bias_size"),
    )


class CausalConv(Operation):
    """out = f(bias + the sum over w of weight[w] * what x is `num_taps` - 1 - w tokens before) of each sequence's
    tokens; x is zero before position 0."""

    _fields_ = Fields(
        (Value, "x out"),
        ("const float*", "weight", "(num_taps, size), that of the oldest input first."),
        ("const float*", "bias", "(size), or null."),
        ("Element*", "state", "(slots, num_taps - 1, size): the last inputs, the oldest first."),
        ("int64_t", "size"),
        ("int64_t", "num_taps", "8 at most."),
        ("int64_t", "activates", "Whether f is `activation`; else it changes nothing."),
        ("Activation", "activation"),
    )


class GatedDeltaRule(Operation):
    """out = query S of each token and value head, where S is the head's state behind the token: what it was before
    decays, then the key's part of it moves towards the value."""

    _fields_ = Fields(
        (Value, "qkv", "Queries, keys, values."),
        (Value, "a b out"),
        ("const float*", "a_log", "(num_heads)"),
        ("const float*", "dt_bias", "(num_heads * num_decays)"),
        ("float*", "state", "(slots, num_heads, key_dim, value_dim)"),
        ("int64_t", "num_key_heads num_heads"),
        ("int64_t", "key_dim", "A multiple of 16, 256 at most."),
        ("int64_t", "value_dim", "A multiple of 16."),
        ("int64_t", "num_decays", "Of a head: 1, or key_dim, of each row of its state."),
    )


class GatedRmsNorm(Operation):
    """out = norm(x) * weight * f(gate) of each group of columns, or norm(x * f(gate)) * weight. Rounded before the
    weight and behind it, if that has elements, and in the end."""

    _fields_ = Fields(
        (Value, "x gate out"),
        (NativeNormWeight, "weight", "(weight_size)"),
        ("int64_t", "size group_size", "The latter is a multiple of 16."),
        ("int64_t", "weight_size", "That of a group, which all have, or of all columns."),
        ("Gate", "activation"),
        ("int64_t", "gate_first", "Whether it is before the norm."),
        ("float", "eps"),
    )


class StateSpaceScan(Operation):
    """out = S c + d * x of each token and head, where S is the head's state behind the token: what it was before
    decays, and the products of x and b are added for the token's part of time."""

    _fields_ = Fields(
        (Value, "x b c dt out"),
        ("const float*", "a_log d dt_bias", "(num_heads) each."),
        ("float*", "state", "(slots, num_heads, head_dim, state_dim)"),
        ("int64_t", "num_heads num_groups"),
        ("int64_t", "head_dim", "A multiple of 16."),
        ("int64_t", "state_dim", "A multiple of 16, 256 at most."),
        ("float", "least most", "Of a token's part of time."),
    )


KINDS: tuple[type[Operation], ...] = (
    Embedding,
    Sum,
    Gather,
    Lora,
    AddDelta,
    Linear,
    GatedLinear,
    HeadLinear,
    Experts,
    Activate,
    ActivateAndMul,
    Scale,
    Permute,
    SoftCap,
    Add,
    Mul,
    SigmoidMul,
    RmsNorm,
    NormOfSum,
    RowSquares,
    RmsNormOfPart,
    LayerNorm,
    RopeAndKvWrite,
    Rope,
    RopeAndLatentWrite,
    DecodeAttention,
    PrefillAttention,
    BidirectionalAttention,
    CausalConv,
    GatedDeltaRule,
    GatedRmsNorm,
    StateSpaceScan,
)

WITH_SEQUENCES: tuple[type[Operation], ...] = (BidirectionalAttention, CausalConv, GatedDeltaRule, StateSpaceScan)
"""Those that must know whose tokens a step has: for a state of each sequence, or for attention in both directions."""
