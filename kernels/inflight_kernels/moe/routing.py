"""How a router chooses experts and weighs them: as data.

Knows no tensor. Every implementation of `route_experts` computes what a Routing says.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Scores(enum.IntEnum):
    """What a router makes of its logits, in float32."""

    SOFTMAX = 0
    SIGMOID = 1


class GroupScore(enum.IntEnum):
    """What groups of experts are compared by: their highest score, or the sum of their two highest."""

    MAX = 0
    TOP2_SUM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Experts of each token and their weights, from the router's logits.

    Mixtral's, and with `renormalize` as in config.json Qwen2-MoE's and Qwen3-MoE's, is the softmax over all experts.
    gpt-oss and Granite take the softmax over the chosen logits: the same with `renormalize`. DeepSeek-V2 (arXiv
    2405.04434) chooses some groups of experts by their maximum first, DeepSeek-V3 (arXiv 2412.19437) and GLM-4.5 by the
    two highest of their scores, which are sigmoids.
    """

    num_chosen: int
    """Experts that compute each token."""
    scores: Scores = Scores.SOFTMAX
    renormalize: bool = True
    """Whether the chosen experts' scores are divided by their sum."""
    epsilon: float = 1e-20
    """What is added to a sum of sigmoids, all of which may be 0: DeepSeek-V3's and GLM-4.5's; LFM2 has 1e-6."""
    scale: float = 1.0
    """Factor of the weights, afterwards."""
    num_groups: int = 1
    """Groups of neighbouring experts, equally many in each."""
    num_chosen_groups: int = 1
    """Those whose experts may be chosen."""
    group_score: GroupScore = GroupScore.MAX

    @property
    def has_groups(self) -> bool:
        """Whether some of the groups are not chosen."""
        return self.num_chosen_groups < self.num_groups

    @property
    def adds_scores(self) -> bool:
        """Whether groups are compared by sums of scores. Otherwise logits have the same order, and are compared instead
        where no bias is added: they differ where scores are rounded to the same number."""
        return self.has_groups and self.group_score is GroupScore.TOP2_SUM

    def fault(self, num_experts: int) -> str:
        """Why so many experts cannot be routed to in this way, as half a sentence; empty if they can."""
        if not 1 <= self.num_chosen <= num_experts:
            return f"{self.num_chosen} of {num_experts} experts cannot be chosen"
        if self.num_groups < 1 or num_experts % self.num_groups:
            return f"{num_experts} experts do not make {self.num_groups} equal groups"
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            return f"{self.num_chosen_groups} of {self.num_groups} groups of experts cannot be chosen"
        in_group = num_experts // self.num_groups
        if self.num_chosen > self.num_chosen_groups * in_group:
            return f"{self.num_chosen_groups} groups of {in_group} experts have fewer than {self.num_chosen}"
        if self.adds_scores and in_group < 2:
            return "groups of one expert have no second score"
        return ""
