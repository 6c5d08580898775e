"""A realistic mix of requests to the default model: greedy and seeded, long and short, streamed or not.

The same seed gives the same requests. Knows the client, and no server.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from inflight_client import Client, Completion

_HEROES = ("a happy fox named Rosa", "a little duck named Jack", "a shy owl", "a brave mouse named Zoë", "an old 🦊")
_PLACES = ("by the pond", "in a den in the forest", "under the café", "on a high hill", "near the market")
_OPENINGS = (
    "Once upon a time",
    "Once upon a time, there was {hero}. {hero} lived {place}.",
    "Every morning, {hero} ate bread for breakfast {place}. One rainy day,",
    "Question: Where did {hero} live?\nAnswer:",
    "One sunny day, {hero} went to a house {place}. Suddenly the sky turned dark and a big storm began. ",
)


@dataclass(frozen=True)
class Asked:
    """One request and the way its answer is read."""

    prompt: str
    options: tuple[tuple[str, Any], ...]
    streamed: bool = False

    @classmethod
    def of(cls, prompt: str, streamed: bool = False, **options: Any) -> Asked:
        return cls(prompt, tuple(sorted(options.items())), streamed)

    def answer(self, client: Client) -> Completion:
        """Raises ClientError."""
        options = dict(self.options)
        if not self.streamed:
            return client.generate(self.prompt, **options)
        with client.stream(self.prompt, **options) as stream:
            text = "".join(chunk.text for chunk in stream)
        assert text == stream.completion.text
        return stream.completion


def mixed_requests(count: int, seed: int, max_tokens: tuple[int, int] = (4, 48)) -> list[Asked]:
    """`count` different requests; their answers have lengths within `max_tokens`."""
    dice = random.Random(seed)
    found: dict[tuple[str, Any], Asked] = {}
    while len(found) < count:
        asked = Asked.of(
            _prompt(dice),
            streamed=dice.random() < 0.5,
            max_tokens=dice.randint(*max_tokens),
            **(_seeded(dice) if dice.random() < 0.6 else {"temperature": 0.0}),
            **({"end_id": -1} if dice.random() < 0.5 else {}),
        )
        found.setdefault((asked.prompt, asked.options), asked)
    return list(found.values())


def alone(client: Client, requests: Iterable[Asked]) -> dict[Asked, Completion]:
    """The answer to each request, sent one at a time."""
    return {asked: asked.answer(client) for asked in requests}


def together(client: Client, requests: list[Asked], streams: int) -> list[Completion]:
    """The answers with `streams` requests in flight at any time, in the order of `requests`."""
    with ThreadPoolExecutor(streams) as threads:
        return list(threads.map(lambda asked: asked.answer(client), requests))


def read_otherwise(asked: Asked) -> Asked:
    """The same request, streamed if it was not and the other way round."""
    return replace(asked, streamed=not asked.streamed)


def _prompt(dice: random.Random) -> str:
    """A few words up to some hundred tokens; many begin alike, as real ones do."""
    opening = dice.choice(_OPENINGS).format(hero=dice.choice(_HEROES), place=dice.choice(_PLACES))
    middle = "".join(
        f" {dice.choice(_HEROES).capitalize()} lived {dice.choice(_PLACES)}."
        for _ in range(dice.choice((0, 0, 1, 3, 12)))
    )
    return opening + middle


def _seeded(dice: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": dice.choice((0.5, 1.0, 1.5)), "seed": dice.getrandbits(64)}
    choices = {
        "top_k": (1, 5, 50),
        "top_p": (0.5, 0.9),
        "min_p": (0.02, 0.1),
        "repetition_penalty": (1.1, 1.3),
        "presence_penalty": (0.5,),
        "frequency_penalty": (0.3,),
    }
    return options | {name: dice.choice(values) for name, values in choices.items() if dice.random() < 0.4}
