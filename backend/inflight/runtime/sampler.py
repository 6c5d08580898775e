"""Samples each row's next token from its logits, on the device. Knows rows and their history, no requests.

Legend: S rows that sample, V vocabulary, X restrictions, L length of the longest bad word without its last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import inflight_kernels
from inflight.runtime.guided.token_mask import TokenMask
from inflight.runtime.logits_post_processing import ProcessedLogits
from inflight.runtime.repeated_ngrams import count_repeating
from inflight.runtime.row_state import RowState
from inflight.runtime.row_table import FLOAT_FIELDS
from inflight.runtime.sampling_input import NO_TOKEN, Restrictions, SamplingInput
from inflight.runtime.weighed_drafts import WeighedDrafts


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    token_ids_S: Tensor
    """int64, always inside the vocabulary."""
    log_probs_S: Tensor | None
    """float32, natural logarithms under the model's raw distribution; None if no row asked for them."""
    is_finite_S: Tensor
    """bool; False = the row's logits hold NaN or infinity and its token is meaningless."""
    faults_P: Tensor | None = None
    """int8, of the rows with logits post-processors; see ProcessedLogits."""

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> SampledTokens:
        """Memory for those of `num_rows` rows, with log probabilities."""
        return cls(
            token_ids_S=torch.empty(num_rows, dtype=torch.int64, device=device),
            log_probs_S=torch.empty(num_rows, dtype=torch.float32, device=device),
            is_finite_S=torch.empty(num_rows, dtype=torch.bool, device=device),
        )


class Sampler:
    def __call__(
        self,
        logits_SV: Tensor,
        sampling: SamplingInput,
        state: RowState,
        mask: TokenMask | None = None,
        processed: ProcessedLogits | None = None,
        last_token_R: Tensor | None = None,
        memory: SampledTokens | None = None,
    ) -> SampledTokens:
        """`mask`: of the rows that follow grammars; None = no row does. `processed`: what tokens are chosen from in
        place of `logits_SV`, if a row has a logits post-processor. `last_token_R`: gets each row's token. `memory`:
        where the results go, all but `faults_P`; None = into memory of their own."""
        allowed_SV = find_allowed(logits_SV, sampling, state.history)
        if mask is not None:
            allowed_SV = mask.restrict(allowed_SV, logits_SV.shape)
        chosen_from_SV = logits_SV if processed is None else processed.logits_SV
        found = memory or SampledTokens.empty(len(logits_SV), logits_SV.device)
        self._sample(chosen_from_SV, sampling, state, allowed_SV, found, last_token_R)
        log_probs_S = found.log_probs_S if sampling.needs.log_probs else None
        if processed is not None:
            # The maximum is NaN if any logit is.
            found.is_finite_S.copy_(torch.isfinite(logits_SV.amax(1)))
            if log_probs_S is not None:
                processed.write_own_log_probs(log_probs_S, found.token_ids_S, logits_SV)
        return SampledTokens(
            token_ids_S=found.token_ids_S,
            log_probs_S=log_probs_S,
            is_finite_S=found.is_finite_S,
            faults_P=None if processed is None else processed.faults(allowed_SV),
        )

    def _sample(
        self,
        logits_SV: Tensor,
        sampling: SamplingInput,
        state: RowState,
        allowed_SV: Tensor | None,
        found: SampledTokens,
        last_token_R: Tensor | None,
    ) -> None:
        """Write the last two arguments. The kernels are the same with and without the last one: all of them are
        compiled before the first request."""
        needs, rows_S = sampling.needs, sampling.rows_S
        # The kernels find the values of each row. What torch computes for some of them needs those of the S in order.
        is_gathered = sampling.typical_K is not None or sampling.weighed is not None
        fields, top_k, seeds = state.fields, state.top_k_R, state.seeds_R
        places_S, written = rows_S, torch.empty_like(state.last_token_R) if last_token_R is None else last_token_R
        if is_gathered:
            of_rows = state.floats_FR.index_select(1, rows_S).unbind(0)
            fields = dict(zip(FLOAT_FIELDS, of_rows, strict=True))
            top_k, seeds = top_k.index_select(0, rows_S), seeds.index_select(0, rows_S)
            places_S, written = torch.arange(len(rows_S), device=rows_S.device), torch.empty_like(rows_S)
        temperature, top_p, min_p = fields["temperature"], fields["top_p"], fields["min_p"]
        penalties: dict[str, Tensor] = {}
        if needs.is_penalised:
            assert state.prompt_mask_RV is not None and state.output_counts_RV is not None
            penalties = {name: fields[name] for name in fields if name.endswith("_penalty")}
            penalties["prompt_mask"] = state.prompt_mask_RV.index_select(0, rows_S)
            counts_SV = penalties["output_counts"] = state.output_counts_RV.index_select(0, rows_S)
            if sampling.counted is not None:
                ones = torch.ones_like(sampling.counted[0], dtype=torch.int32)
                counts_SV.index_put_(sampling.counted, ones, accumulate=True)
        bias_SV = None
        if needs.is_biased:
            assert state.bias_RV is not None
            bias_SV = state.bias_RV.index_select(0, rows_S)
        own_filters = (top_k, top_p, min_p)
        if sampling.typical_K is not None:
            allowed_SV = _keep_typical(
                sampling.typical_K,
                (logits_SV, temperature, top_k, top_p, min_p, fields["typical_p"]),
                allowed_SV,
                **penalties,
                logit_bias=bias_SV,
            )
            # The mask has applied the other filters of these rows: of what it keeps they would drop more.
            top_k, min_p = (values.index_fill(0, sampling.typical_K, 0) for values in (top_k, min_p))
            top_p = top_p.index_fill(0, sampling.typical_K, 1)
        inflight_kernels.sample(
            logits_SV,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            sampling.lengths_S,
            **penalties,
            logit_bias=bias_SV,
            allowed_mask=allowed_SV,
            all_greedy=not needs.is_random,
            any_top_k=needs.any_top_k,
            any_top_p=needs.any_top_p,
            any_min_p=needs.any_min_p,
            with_logprobs=needs.log_probs,
            token_ids=found.token_ids_S,
            logprobs=found.log_probs_S,
            is_finite=found.is_finite_S,
            last_tokens=written,
            rows=places_S,
        )
        if sampling.weighed is not None:
            arguments = (logits_SV, temperature, top_k, top_p, min_p, seeds, sampling.lengths_S)
            options = {**penalties, "logit_bias": bias_SV, "allowed_mask": allowed_SV}
            places_K = sampling.weighed.places_K
            token_ids_K = _weigh(sampling.weighed, arguments, own_filters, found.token_ids_S, options)
            # With NaN among the logits it may be any number, and the next step looks up its embedding all the same.
            found.token_ids_S.index_copy_(0, places_K, token_ids_K.clamp_(0, logits_SV.shape[1] - 1))
            if needs.log_probs and found.log_probs_S is not None:
                log_probs_K = _log_probs(logits_SV.index_select(0, places_K), token_ids_K)
                found.log_probs_S.index_copy_(0, places_K, log_probs_K)
        if is_gathered and last_token_R is not None:
            last_token_R.index_copy_(0, rows_S, found.token_ids_S)


def _keep_typical(
    rows_K: Tensor, arguments: tuple[Tensor, ...], allowed_SV: Tensor | None, **options: Tensor | None
) -> Tensor:
    """bool (S, V): the tokens that are allowed, and of the rows `rows_K` only those that their typical_p keeps.

    `arguments` and `options`, of all S rows: those of `inflight_kernels.typical_mask`.
    """
    options["allowed_mask"] = allowed_SV
    given = {name: values.index_select(0, rows_K) for name, values in options.items() if values is not None}
    kept_KV = inflight_kernels.typical_mask(*(values.index_select(0, rows_K) for values in arguments), **given)
    if allowed_SV is None:
        allowed_SV = torch.ones(arguments[0].shape, dtype=torch.bool, device=rows_K.device)
    return allowed_SV.index_copy(0, rows_K, kept_KV)


def _weigh(
    weighed: WeighedDrafts,
    arguments: tuple[Tensor, ...],
    filters: tuple[Tensor, ...],
    sampled_S: Tensor,
    options: dict[str, Tensor | None],
) -> Tensor:
    """int64 (K): the tokens at places with weighed drafts.

    `arguments` and `options`, of all S rows: those of `inflight_kernels.sample`, which has `sampled_S`. `filters`:
    top_k, top_p and min_p as the requests have them.
    """
    places_K = weighed.places_K
    logits_KV, temperature_K, top_k_K, top_p_K, min_p_K, seeds_K, positions_K = (
        values.index_select(0, places_K) for values in arguments
    )
    own_top_k_K, own_top_p_K, own_min_p_K = (values.index_select(0, places_K) for values in filters)
    given = {name: values.index_select(0, places_K) for name, values in options.items() if values is not None}
    draft_probs_KV = inflight_kernels.sampling_probabilities(
        weighed.logits(logits_KV.shape[1]), temperature_K, own_top_k_K, own_top_p_K, own_min_p_K
    )
    return inflight_kernels.speculative_sample(
        logits_KV,
        temperature_K,
        top_k_K,
        top_p_K,
        min_p_K,
        seeds_K,
        positions_K,
        weighed.tokens_K,
        draft_probs_KV,
        weighed.thresholds_K,
        sampled_S.index_select(0, places_K),
        **given,
    )


def _log_probs(logits_KV: Tensor, token_ids_K: Tensor) -> Tensor:
    """float32 (K): of tokens that must be in the vocabulary, under the raw distribution."""
    raw_KV = logits_KV.float()
    return raw_KV.gather(1, token_ids_K[:, None]).squeeze(1) - inflight_kernels.log_sum_exp(raw_KV)


def find_allowed(logits_SV: Tensor, sampling: SamplingInput, history: Tensor | None) -> Tensor | None:
    """bool (S, V): False for the tokens that are forbidden now; None = all are allowed.

    `history`: int64 (rows, positions), on the device.
    """
    if sampling.restrictions is None and sampling.ngrams is None:
        return None
    times_SV = torch.zeros(logits_SV.shape, dtype=torch.int32, device=logits_SV.device)
    if sampling.restrictions is not None:
        _count_restricted(sampling.restrictions, history, times_SV)
    if sampling.ngrams is not None:
        assert history is not None
        count_repeating(sampling.ngrams, history, times_SV)
    return times_SV == 0


def _count_restricted(restrictions: Restrictions, history: Tensor | None, times_SV: Tensor) -> None:
    """Add to `times_SV`, for each token, how many restrictions apply to it."""
    applies_X = torch.ones_like(restrictions.places_X, dtype=torch.int32)
    if restrictions.beginnings_XL is not None:
        assert history is not None and restrictions.rows_X is not None and restrictions.lengths_X is not None
        beginnings_XL = restrictions.beginnings_XL
        longest = beginnings_XL.shape[1]
        offsets_L = torch.arange(-longest, 0, device=times_SV.device)
        places_XL = restrictions.lengths_X[:, None] + offsets_L
        before_XL = history[restrictions.rows_X[:, None], places_XL.clamp(min=0)]
        matches_XL = (before_XL == beginnings_XL) & (places_XL >= 0)
        applies_X = (matches_XL | (beginnings_XL == NO_TOKEN)).all(1).int()
    # Several restrictions may forbid the same token; a sum does not depend on their order.
    times_SV.view(-1).index_add_(0, restrictions.places_X, applies_X)
