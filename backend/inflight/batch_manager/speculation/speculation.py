"""The drafts of one sequence, whatever source they come from."""

from __future__ import annotations

from inflight.batch_manager.speculation.drafter import NO_DRAFTS, Drafter
from inflight.batch_manager.speculation.given_tokens import GivenTokens
from inflight.batch_manager.speculation.lookahead import Lookahead
from inflight.batch_manager.speculation.prompt_lookup import PromptLookup
from inflight.request import Request
from inflight.scheduler_output import NO_DRAFT
from inflight.speculative_decoding import NO_LOOKAHEAD, LookaheadDecodingConfig, NGramDecodingConfig


class Speculation:
    __slots__ = ("_drafter", "_drafters", "_weighed", "is_verifying", "num_accepted_tokens", "num_draft_tokens")

    def __init__(self, drafters: list[Drafter], weighed: GivenTokens | None = None) -> None:
        """`drafters`: at least one. The first that has drafts is followed. `weighed`: the one of them whose drafts are
        accepted by their probability."""
        self.is_verifying = False
        """A launched step verifies drafts: how many tokens the sequence has is not known before its results."""
        self.num_draft_tokens = 0
        """Drafts that steps have verified."""
        self.num_accepted_tokens = 0
        self._drafters = drafters
        self._weighed = weighed
        self._drafter = drafters[0]  # where the latest drafts came from

    @classmethod
    def wanted_by(
        cls,
        request: Request,
        default: NGramDecodingConfig,
        default_lookahead: LookaheadDecodingConfig = NO_LOOKAHEAD,
    ) -> Speculation | None:
        """None if nothing is to be guessed, or if the state that tokens are sampled by follows them one by one.

        `default`, `default_lookahead`: for a request that says nothing about prompt lookup, or about lookahead
        decoding. What is given is certain to be meant, and a text that repeats itself is guessed at no cost for places
        beyond the guess; so lookahead decoding comes last.
        """
        if request.follows_each_token:
            return None
        drafters: list[Drafter] = []
        weighed: GivenTokens | None = None
        external = request.external_draft_tokens_config
        if external is not None and external.tokens:
            given = GivenTokens(external.tokens, len(request.input_token_ids))
            drafters.append(given)
            weighed = given if request.weighed_drafts is not None else None
        ngram = default if request.ngram_config is None else request.ngram_config
        # Ids beyond the vocabulary, of embeddings that the prompt brings, are no tokens that could follow.
        if ngram.max_draft_len > 0 and request.prompt_tuning_config is None:
            drafters.append(PromptLookup(ngram))
        lookahead = default_lookahead if request.lookahead_config is None else request.lookahead_config
        if not lookahead.is_off and request.prompt_tuning_config is None:
            drafters.append(Lookahead(lookahead))
        return cls(drafters, weighed) if drafters else None

    def must_wait(self, token_ids: list[int], num_pending: int) -> bool:
        """Whether a launched step must first say what comes behind `token_ids`: how many drafts it accepted, or whether
        the output still is what was given with logits or a threshold, by which the next token is then chosen."""
        weighed = self._weighed
        return self.is_verifying or (
            num_pending > 0 and weighed is not None and weighed.is_followed(token_ids, num_pending)
        )

    def draft_index(self, token_ids: list[int], num_pending: int) -> int:
        """See RowWork.draft_index, of a row that samples behind `token_ids` and `num_pending` more."""
        return NO_DRAFT if self._weighed is None or num_pending else self._weighed.next_index(token_ids)

    def share_prompt(self, other: Speculation, num_tokens: int) -> None:
        """Index the prompt, of so many tokens, once for this and `other`, two sequences of a request."""
        for drafter, its in zip(self._drafters, other._drafters, strict=True):
            if isinstance(drafter, PromptLookup) and isinstance(its, PromptLookup):
                drafter.share_prompt(its, num_tokens)

    def propose(self, token_ids: list[int], num_pending: int, most: int) -> list[int]:
        """At most `most` tokens that may follow `token_ids` and `num_pending` more, which are still on the device and
        are guessed, too."""
        for drafter in self._drafters:
            drafts = drafter.propose(token_ids, num_pending, most)
            if drafts:
                self._drafter = drafter
                return drafts
        return NO_DRAFTS

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int = 1) -> None:
        """A step has verified drafts; its sequence now has `num_tokens` tokens, and is one of `num_running`."""
        self.is_verifying = False
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self._drafter.account(num_drafts, num_accepted, num_tokens, num_running)

    def learn(self, token_ids: list[int], num_new: int, guesses: list[int]) -> None:
        """That step's new tokens are the last `num_new` of `token_ids`; `guesses` is what it sampled behind them, see
        StepOutput.guesses."""
        if isinstance(self._drafter, Lookahead):
            self._drafter.learn(token_ids, num_new, guesses)
