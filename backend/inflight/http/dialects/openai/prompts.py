"""The prompts of one body."""

from __future__ import annotations

from inflight.asking.ask import Prompt
from inflight.http.api_error import invalid
from inflight.http.dialects.body import MAX_PROMPTS


def split_prompts(given: str | list[str | int | list[int]], field: str = "prompt") -> list[Prompt]:
    """One text, one row of token ids, or a list of either. `field`: where they stand. Raises APIError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(f"{field} is empty: give at least one character or token", field)
    if all(isinstance(each, int) for each in given):
        return [[each for each in given if isinstance(each, int)]]
    prompts: list[Prompt] = [each for each in given if isinstance(each, str | list)]
    if len({type(each) for each in given}) > 1 or len(prompts) < len(given):
        raise invalid(f"{field} must be a text, a list of texts, a list of token ids or a list of such lists", field)
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"{field} has {len(prompts)} entries, more than {MAX_PROMPTS}", field)
    return prompts
