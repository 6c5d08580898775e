"""The drafts of one sequence, whatever source they come from."""

from __future__ import annotations

from inflight.batch_manager.speculation.drafter import NO_DRAFTS, Drafter
from inflight.batch_manager.speculation.forced_tokens import ForcedTokens
from inflight.batch_manager.speculation.given_tokens import GivenTokens
from inflight.batch_manager.speculation.lookahead import Lookahead
from inflight.batch_manager.speculation.model_drafts import ModelDrafts
from inflight.batch_manager.speculation.prompt_lookup import PromptLookup
from inflight.request import Request
from inflight.scheduler_output import NO_DRAFT
from inflight.speculative_decoding import NO_SPECULATION, SpeculativeDecodingConfig


class Speculation:
    __slots__ = (
        "_drafter",
        "_drafters",
        "_forced",
        "_lookahead",
        "_lookup",
        "_model",
        "_weighed",
        "is_verifying",
        "num_accepted_tokens",
        "num_draft_tokens",
    )

    def __init__(
        self,
        *,
        given: GivenTokens | None = None,
        is_weighed: bool = False,
        forced: ForcedTokens | None = None,
        lookup: PromptLookup | None = None,
        lookahead: Lookahead | None = None,
        model: ModelDrafts | None = None,
    ) -> None:
        """The first that has drafts is followed. What is given reaches further than what a grammar
        forces, which is certain; a text that repeats itself is guessed at no cost for places beyond the guess; the
        last two have drafts at any time.

        `is_weighed`: drafts that are given are accepted by their probability.
        """
        self.is_verifying = False
        """A launched step verifies drafts: how many tokens the sequence has is not known before its results."""
        self.num_draft_tokens = 0
        """Drafts that steps have verified."""
        self.num_accepted_tokens = 0
        self._weighed = given if is_weighed else None
        self._forced = forced
        self._lookup = lookup
        self._lookahead = lookahead
        self._model = model
        drafters: tuple[Drafter | None, ...] = (given, forced, lookup, lookahead, model)
        self._drafters = [drafter for drafter in drafters if drafter is not None]
        self._drafter: Drafter | None = None  # where the latest drafts came from

    @classmethod
    def wanted_by(cls, request: Request, default: SpeculativeDecodingConfig = NO_SPECULATION) -> Speculation | None:
        """None if nothing is to be guessed, or if the state that tokens are sampled by follows them one by one.

        `default`: for a request that says nothing about a way to guess.
        """
        if request.follows_each_token:
            return None
        # Ids beyond the vocabulary, of embeddings that the prompt brings, are no tokens that could follow.
        is_text = request.prompt_tuning_config is None
        external = request.external_draft_tokens_config
        ngram = request.ngram_config or default.ngram
        lookahead = request.lookahead_config or default.lookahead
        model = request.draft_target_config or default.draft_target
        # A grammar's masks are filled before the host knows what the draft model has made.
        can_draft = is_text and request.guided_decoding_params is None
        speculation = cls(
            given=GivenTokens(external.tokens, len(request.input_token_ids)) if external and external.tokens else None,
            is_weighed=request.weighed_drafts is not None,
            forced=ForcedTokens() if request.guided_decoding_params is not None else None,
            lookup=PromptLookup(ngram) if is_text and ngram.max_draft_len else None,
            lookahead=Lookahead(lookahead) if is_text and not lookahead.is_off else None,
            model=ModelDrafts(model) if can_draft and model.max_draft_len else None,
        )
        return speculation if speculation._drafters else None

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
        if self._lookup is not None and other._lookup is not None:
            self._lookup.share_prompt(other._lookup, num_tokens)

    def note_forced(self, tokens: list[int], num_tokens: int) -> None:
        """The sequence's grammar most likely leaves only `tokens` behind its first `num_tokens`."""
        if self._forced is not None:
            self._forced.note(tokens, num_tokens)

    def propose(self, token_ids: list[int], num_pending: int, most: int) -> list[int]:
        """At most `most` tokens that may follow `token_ids` and `num_pending` more, which are still on the device and
        are guessed, too."""
        for drafter in self._drafters:
            drafts = drafter.propose(token_ids, num_pending, most)
            if drafts:
                self._drafter = drafter
                return drafts
        return NO_DRAFTS

    @property
    def num_seen(self) -> int:
        """Leading tokens that the draft model has computed, apart from prefills."""
        return 0 if self._model is None else self._model.num_seen

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int = 1) -> None:
        """A step has verified drafts; its sequence now has `num_tokens` tokens, and is one of `num_running`."""
        self.is_verifying = False
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        assert self._drafter is not None, "drafts that nobody has proposed"
        self._drafter.account(num_drafts, num_accepted, num_tokens, num_running)

    def learn(self, token_ids: list[int], num_new: int, guesses: list[int]) -> None:
        """That step's new tokens are the last `num_new` of `token_ids`; `guesses` is what it sampled behind them, see
        StepOutput.guesses."""
        if self._lookahead is not None and self._drafter is self._lookahead:
            self._lookahead.learn(token_ids, num_new, guesses)
