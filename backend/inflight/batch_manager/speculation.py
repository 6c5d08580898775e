"""What one sequence's next tokens may be, guessed on the host, and whether guessing pays.

Drafts come from the request itself (ExternalDraftTokensConfig) or from earlier text (NGramDecodingConfig). They never
change a token, see `inflight.speculative_decoding`; so all that is decided here is how much work a step does.

Counted in tokens and steps, never in time, so that all ranks decide the same. Knows no blocks and no rows.
"""

from __future__ import annotations

from inflight.batch_manager.ngram_index import NGramIndex
from inflight.request import Request
from inflight.speculative_decoding import NGramDecodingConfig

NO_DRAFTS: list[int] = []
"""Never written to."""

FIRST_DRAFT_LEN = 4
TOKEN_GAIN, STEP_COST, DRAFT_COST = 5, 5, 1
"""In fifths of a step. Each accepted draft saves a step. One that verifies costs its sequence the step behind it, which
waits for the host, and a fifth of a step for each draft, more beside many sequences: so it is on two CPU cores, where
16 rows take four times as long as one. A GPU computes drafts at less cost."""
SEQUENCES_OF_DRAFT_COST = 8
"""So many more sequences in the batch add another DRAFT_COST."""
MIN_SCORE, MAX_SCORE = -10, 20
"""Speculation rests when gains minus costs have fallen to the first; above the second no more is saved up, so that it
rests soon where the text stops repeating itself."""
FIRST_REST, MAX_REST = 32, 1024
"""Tokens without drafts: twice as many after every rest that one attempt follows in vain."""


class Speculation:
    """Of one sequence."""

    __slots__ = (
        "_draft_len",
        "_given",
        "_index",
        "_is_given",
        "_max_draft_len",
        "_num_matched",
        "_rest",
        "_rests_until",
        "_score",
        "is_verifying",
        "num_accepted_tokens",
        "num_draft_tokens",
    )

    def __init__(self, ngram: NGramDecodingConfig | None, given: list[int]) -> None:
        self.is_verifying = False
        """A launched step verifies drafts: how many tokens the sequence has is not known before its results."""
        self.num_draft_tokens = 0
        """Drafts that steps have verified."""
        self.num_accepted_tokens = 0
        self._given = given
        self._num_matched = 0  # of the given ones
        self._is_given = False  # where the latest drafts came from
        self._index = NGramIndex(ngram.max_matching_ngram_size) if ngram is not None else None
        self._max_draft_len = ngram.max_draft_len if ngram is not None else 0
        self._draft_len = min(FIRST_DRAFT_LEN, self._max_draft_len)
        self._score = 0
        self._rest = FIRST_REST
        self._rests_until = 0

    @classmethod
    def wanted_by(cls, request: Request, default: NGramDecodingConfig) -> Speculation | None:
        """None if nothing is to be guessed, or if the state that tokens are sampled by follows them one by one.

        `default`: for a request that says nothing about prompt lookup.
        """
        if request.sampling_config.follows_each_token:
            return None
        ngram = default if request.ngram_config is None else request.ngram_config
        external = request.external_draft_tokens_config
        given = [] if external is None else external.tokens
        if not given and not ngram.max_draft_len:
            return None
        return cls(ngram if ngram.max_draft_len else None, given)

    def propose(self, token_ids: list[int], num_prompt_tokens: int, num_pending: int, most: int) -> list[int]:
        """At most `most` tokens that may follow `token_ids` and `num_pending` more, which are still on the device and
        are guessed, too."""
        self._is_given = bool(self._given) and self._still_matches(token_ids, num_prompt_tokens)
        if self._is_given:
            first = len(token_ids) - num_prompt_tokens + num_pending
            return self._given[first : first + most]
        if self._index is None:
            return NO_DRAFTS
        self._index.extend(token_ids)
        count = min(most, self._draft_len)
        if count <= 0 or len(token_ids) < self._rests_until:
            return NO_DRAFTS
        return self._index.continuation(token_ids, num_pending + count)[num_pending:]

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int = 1) -> None:
        """A step has verified drafts; its sequence now has `num_tokens` tokens, and is one of `num_running`."""
        self.is_verifying = False
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        if self._is_given:
            return
        full = num_accepted == num_drafts
        self._draft_len = min(2 * num_drafts if full else max(num_accepted + 1, 2), self._max_draft_len)
        draft_cost = DRAFT_COST * (1 + num_running // SEQUENCES_OF_DRAFT_COST)
        gain = TOKEN_GAIN * num_accepted - STEP_COST - draft_cost * num_drafts
        self._score = min(self._score + gain, MAX_SCORE)
        if self._score > 0:
            self._rest = FIRST_REST
        elif self._score <= MIN_SCORE:
            self._rests_until = num_tokens + self._rest
            self._rest = min(2 * self._rest, MAX_REST)
            self._score = MIN_SCORE + STEP_COST

    def _still_matches(self, token_ids: list[int], num_prompt_tokens: int) -> bool:
        """Whether the output so far is what was given, and more was given than that."""
        output = token_ids[num_prompt_tokens + self._num_matched :]
        expected = self._given[self._num_matched : self._num_matched + len(output)]
        self._num_matched += len(output)
        if output != expected or self._num_matched >= len(self._given):
            self._given = []
        return bool(self._given)


class DraftCount:
    """What the steps of one iteration have found of drafts."""

    __slots__ = ("num_accepted_tokens", "num_draft_tokens", "num_sequences")

    def __init__(self) -> None:
        self.num_draft_tokens = self.num_accepted_tokens = self.num_sequences = 0

    def reset(self) -> None:
        if self.num_sequences:
            self.num_draft_tokens = self.num_accepted_tokens = self.num_sequences = 0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Of one sequence."""
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_sequences += 1
