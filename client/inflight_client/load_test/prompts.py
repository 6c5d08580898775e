"""The prompts of a load test, each sent only once.

They are random token ids, so that their length is exact for every tokenizer; or random words, one for each token asked
for, where a model takes text only; or lines of a text file, if real text matters more than exact lengths. No two of the
random ones share a prefix that a cache could serve.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from inflight_client._exceptions import UsageError

_WORDS = (
    "a and at big bird blue boat boy but came cat day dog down fish for found fox girl good green had happy he her his "
    "home hot house in is it jump king lake little look man moon more new not of old on one out play rain ran red sad "
    "said sea see she sky small so star sun the they to tree up very was water went were wind with"
)
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Lengths are in tokens; each request draws its lengths at random between the bounds."""

    input_tokens: tuple[int, int] = (64, 64)
    output_tokens: tuple[int, int] = (64, 64)
    vocabulary: int = 256
    """Random ids are below this number; every model has at least 256."""
    prompt_file: Path | None = None
    """Text prompts, one per line, used in turn instead of random ids."""
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in (("input tokens", self.input_tokens), ("output tokens", self.output_tokens)):
            if not 1 <= low <= high:
                raise UsageError(f"{name} must be at least 1 and in ascending order, got {low}:{high}")
        if self.vocabulary < 2:
            raise UsageError(f"the vocabulary must have at least 2 tokens, got {self.vocabulary}")


@dataclass(frozen=True)
class Prompt:
    """What one request sends, in no server's form yet."""

    content: str | list[int]
    """Text, or token ids."""
    max_tokens: int
    seed: int


def parse_length(text: str) -> tuple[int, int]:
    """Parse "64" or "32:256" to (lowest, highest)."""
    try:
        bounds = [int(part) for part in text.split(":")]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2):
        raise UsageError(f"{text!r} is not a length; write 64 or 32:256")
    return bounds[0], bounds[-1]


def make_prompts(options: PromptOptions, count: int, *, level: str, as_text: bool = False) -> list[Prompt]:
    """`count` prompts; different ones for each `level`, the same in every run. `as_text`: words in place of ids."""
    # One generator per level, seeded by its name: requests of a level do not depend on earlier levels.
    generator = random.Random(f"{options.seed}/{level}")
    lines = _prompt_lines(options.prompt_file) if options.prompt_file else []
    return [_prompt(options, generator, lines, index, as_text) for index in range(count)]


def _prompt(options: PromptOptions, generator: random.Random, lines: list[str], index: int, as_text: bool) -> Prompt:
    length = generator.randint(*options.input_tokens)
    max_tokens, seed = generator.randint(*options.output_tokens), generator.getrandbits(31)
    if lines:
        return Prompt(lines[index % len(lines)], max_tokens, seed)
    if as_text:
        return Prompt(" ".join(generator.choices(WORDS, k=length)), max_tokens, seed)
    return Prompt([generator.randrange(options.vocabulary) for _ in range(length)], max_tokens, seed)


def _prompt_lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the prompts in {path} cannot be read: {error}") from None
    if not lines:
        raise UsageError(f"{path} holds no prompts")
    return lines
