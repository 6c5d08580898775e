"""From logits to one token per row, on the device, with no host synchronisation and no sorted or normalised copy.

    x  = penalised(mask(logits + bias)),   w = 2^((x - max x) log2(e) / temperature)
    keep = top-k: x >= x_(k),   then top-p: smallest descending set with mass >= p of that,   then min-p: w >= min_p
    token = first index in vocabulary order whose running kept mass exceeds u * total,   u = philox(seed, position)
    logprob = logits[token] - logsumexp(logits)

Three kernels. `tile_stats`, grid (B, tiles), reduces each tile of a row and writes x where it differs from the logits;
`threshold`, grid (B,), only when some row filters, finds by bisection over the values present the smallest kept x and
how many of its ties stay; `pick`, grid (B,), turns the uniform number into a tile and then into an index.
A row is cut into tiles by its length alone, so a row's token never depends on the batch.
Bytes: one read of the logits, one more tile a row; with filters about 20 further passes that a row makes through L2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.ops._checks import (
    cdiv,
    check_dtype,
    check_float,
    check_shape,
    check_unit_stride,
    check_vector,
    next_power_of_2,
)
from inflight_kernels.ops._sampling_kernels import pick_kernel, threshold_kernel, tile_stats_kernel

# Logits a tile: 16 a thread with 8 warps. Not measured yet.
BLOCK_VOCAB = 4096
# Planes of the statistics scratch, each (B, tiles) float32.
NUM_STATS = 5


def _check_rows(name: str, tensor: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if tensor is not None:
        check_dtype(name, tensor, dtype)
        check_shape(name, tensor, shape)
        check_unit_stride(name, tensor)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    output_counts: Tensor | None = None,
    logit_bias: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    *,
    all_greedy: bool = False,
    any_top_k: bool = True,
    any_top_p: bool = True,
    any_min_p: bool = True,
    with_logprobs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Launch sampling of `logits` (B, V); see `inflight_kernels.sample`. Log-probabilities are by-products here."""
    check_float("logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be (batch, vocabulary) of at least one token, got {tuple(logits.shape)}")
    check_unit_stride("logits", logits)
    batch, vocab_size = logits.shape
    vectors = (("temperature", temperature), ("top_p", top_p), ("min_p", min_p))
    penalties = (
        ("repetition_penalty", repetition_penalty),
        ("presence_penalty", presence_penalty),
        ("frequency_penalty", frequency_penalty),
    )
    for name, vector in vectors + penalties:
        if vector is not None:
            check_vector(name, vector, batch, torch.float32)
    check_vector("top_k", top_k, batch, torch.int32)
    check_vector("seeds", seeds, batch, torch.int64)
    check_vector("positions", positions, batch, torch.int64)
    shape = (batch, vocab_size)
    _check_rows("prompt_mask", prompt_mask, shape, torch.bool)
    _check_rows("output_counts", output_counts, shape, torch.int32)
    _check_rows("logit_bias", logit_bias, shape, torch.float32)
    _check_rows("allowed_mask", allowed_mask, shape, torch.bool)

    device = logits.device
    token_ids = torch.empty(batch, dtype=torch.int64, device=device)
    logprobs = torch.empty(batch, dtype=torch.float32, device=device)
    if batch == 0:
        return token_ids, logprobs
    has_repetition = repetition_penalty is not None and (prompt_mask is not None or output_counts is not None)
    has_presence = presence_penalty is not None and output_counts is not None
    has_frequency = frequency_penalty is not None and output_counts is not None
    has_counts = output_counts is not None and (has_repetition or has_presence or has_frequency)
    has_prompt_mask = prompt_mask is not None and has_repetition
    changes = has_repetition or has_presence or has_frequency or logit_bias is not None or allowed_mask is not None
    num_tiles = cdiv(vocab_size, BLOCK_VOCAB)
    stats = torch.empty((NUM_STATS, batch, num_tiles), dtype=torch.float32, device=device)
    argmax = torch.empty((batch, num_tiles), dtype=torch.int32, device=device)
    x = torch.empty(shape, dtype=torch.float32, device=device) if changes else logits

    def or_logits(tensor: Tensor | None) -> Tensor:
        return logits if tensor is None else tensor

    def row_stride(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.stride(0)

    tile_stats_kernel[(batch, num_tiles)](
        logits,
        temperature,
        or_logits(repetition_penalty),
        or_logits(presence_penalty),
        or_logits(frequency_penalty),
        or_logits(prompt_mask),
        or_logits(output_counts),
        or_logits(logit_bias),
        or_logits(allowed_mask),
        x,
        stats,
        argmax,
        vocab_size,
        num_tiles,
        logits.stride(0),
        row_stride(prompt_mask),
        row_stride(output_counts),
        row_stride(logit_bias),
        row_stride(allowed_mask),
        HAS_REPETITION=has_repetition,
        HAS_PRESENCE=has_presence,
        HAS_FREQUENCY=has_frequency,
        HAS_PROMPT_MASK=has_prompt_mask,
        HAS_COUNTS=has_counts,
        HAS_BIAS=logit_bias is not None,
        HAS_ALLOWED=allowed_mask is not None,
        BLOCK_V=BLOCK_VOCAB,
        num_warps=8,
    )
    has_filter = not all_greedy and (any_top_k or any_top_p or any_min_p)
    threshold = torch.empty(batch if has_filter else 0, dtype=torch.float32, device=device)
    ties = torch.empty(batch if has_filter else 0, dtype=torch.int32, device=device)
    block_s = next_power_of_2(num_tiles)
    if has_filter:
        threshold_kernel[(batch,)](
            x,
            temperature,
            top_k,
            top_p,
            stats,
            threshold,
            ties,
            vocab_size,
            num_tiles,
            x.stride(0),
            HAS_TOP_K=any_top_k,
            HAS_TOP_P=any_top_p,
            BLOCK_S=block_s,
            BLOCK_V=BLOCK_VOCAB,
            num_warps=8,
        )
    pick_kernel[(batch,)](
        logits,
        x,
        temperature,
        min_p,
        seeds,
        positions,
        stats,
        argmax,
        threshold,
        ties,
        token_ids,
        logprobs,
        vocab_size,
        num_tiles,
        logits.stride(0),
        x.stride(0),
        HAS_FILTER=has_filter,
        HAS_MIN_P=any_min_p,
        BLOCK_S=block_s,
        BLOCK_V=BLOCK_VOCAB,
        num_warps=8,
    )
    return token_ids, logprobs
