"""The drafts of one sequence, whatever source they come from."""

from __future__ import annotations

from inflight.batch_manager.speculation.drafter import NO_DRAFTS, Drafter
from inflight.batch_manager.speculation.given_tokens import GivenTokens
from inflight.batch_manager.speculation.model_drafts import ModelDrafts
from inflight.batch_manager.speculation.prompt_lookup import PromptLookup
from inflight.request import Request
from inflight.speculative_decoding import DraftTargetDecodingConfig, NGramDecodingConfig

NO_DRAFT_MODEL = DraftTargetDecodingConfig(max_draft_len=0)


class Speculation:
    __slots__ = (
        "_drafter",
        "_drafters",
        "_model_drafts",
        "is_verifying",
        "num_accepted_tokens",
        "num_draft_tokens",
    )

    def __init__(self, drafters: list[Drafter]) -> None:
        """`drafters`: at least one. The first that has drafts is followed."""
        self.is_verifying = False
        """A launched step verifies drafts: how many tokens the sequence has is not known before its results."""
        self.num_draft_tokens = 0
        """Drafts that steps have verified."""
        self.num_accepted_tokens = 0
        self._drafters = drafters
        self._drafter = drafters[0]  # where the latest drafts came from
        self._model_drafts = next((drafter for drafter in drafters if isinstance(drafter, ModelDrafts)), None)

    @classmethod
    def wanted_by(
        cls, request: Request, default: NGramDecodingConfig, default_model: DraftTargetDecodingConfig = NO_DRAFT_MODEL
    ) -> Speculation | None:
        """None if nothing is to be guessed, or if the state that tokens are sampled by follows them one by one.

        `default`: for a request that says nothing about prompt lookup; `default_model`: about the draft model.
        """
        if request.follows_each_token:
            return None
        drafters: list[Drafter] = []
        external = request.external_draft_tokens_config
        if external is not None and external.tokens:
            drafters.append(GivenTokens(external.tokens, len(request.input_token_ids)))
        ngram = default if request.ngram_config is None else request.ngram_config
        # Ids beyond the vocabulary, of embeddings that the prompt brings, are no tokens that could follow.
        if ngram.max_draft_len > 0 and request.prompt_tuning_config is None:
            drafters.append(PromptLookup(ngram))
        model = default_model if request.draft_target_config is None else request.draft_target_config
        # Nor can the draft model compute them.
        if model.max_draft_len > 0 and request.prompt_tuning_config is None:
            drafters.append(ModelDrafts(model))
        return cls(drafters) if drafters else None

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
        return 0 if self._model_drafts is None else self._model_drafts.num_seen

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int = 1) -> None:
        """A step has verified drafts; its sequence now has `num_tokens` tokens, and is one of `num_running`."""
        self.is_verifying = False
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self._drafter.account(num_drafts, num_accepted, num_tokens, num_running)
