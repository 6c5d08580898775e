"""The prompts of a load test, each sent only once, as perf_analyzer's input file.

Prompts are random token ids, so that their length is exact for every tokenizer and no two share a prefix that a cache
could serve; or lines of a text file, if real text matters more than exact lengths.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from inflight_client._exceptions import UsageError

NO_END = -1


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


def parse_length(text: str) -> tuple[int, int]:
    """Parse "64" or "32:256" to (lowest, highest)."""
    try:
        bounds = [int(part) for part in text.split(":")]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2):
        raise UsageError(f"{text!r} is not a length; write 64 or 32:256")
    return bounds[0], bounds[-1]


def make_requests(options: PromptOptions, count: int, *, level: str) -> list[dict[str, object]]:
    """`count` requests in perf_analyzer's JSON form; different ones for each `level`, the same in every run."""
    # One generator per level, seeded by its name: requests of a level do not depend on earlier levels.
    generator = random.Random(f"{options.seed}/{level}")
    lines = _prompt_lines(options.prompt_file) if options.prompt_file else []
    return [_request(options, generator, lines, index) for index in range(count)]


def write_requests(requests: list[dict[str, object]], path: Path) -> None:
    path.write_text(json.dumps({"data": requests}), encoding="utf-8")


def _request(options: PromptOptions, generator: random.Random, lines: list[str], index: int) -> dict[str, object]:
    length = generator.randint(*options.input_tokens)
    tensors: dict[str, list[object]] = {
        "max_tokens": [generator.randint(*options.output_tokens)],
        "end_id": [NO_END],
        "stream": [True],
        "temperature": [options.temperature],
        "seed": [generator.getrandbits(31)],
        "exclude_input_in_output": [True],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
    }
    if lines:
        tensors["text_input"] = [lines[index % len(lines)]]
    else:
        tensors["input_ids"] = [generator.randrange(options.vocabulary) for _ in range(length)]
    return {name: {"content": content, "shape": [len(content)]} for name, content in tensors.items()}


def _prompt_lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the prompts in {path} cannot be read: {error}") from None
    if not lines:
        raise UsageError(f"{path} holds no prompts")
    return lines
