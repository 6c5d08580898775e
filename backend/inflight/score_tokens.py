"""Tokens by whose logits a language model says how well a text answers a question: of yes and no, say.

A reranker of this kind has the files of any language model. Which tokens count is said by the operator, or by the
checkpoint: the module LogitScore of sentence-transformers (modules.json, with a folder of its own), or
`classifier_from_token` in config.json, which vLLM reads.

Format: https://www.sbert.net/docs/package_reference/cross_encoder/modules.html
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from inflight.checkpoint_files import CONFIG, LOGIT_SCORE, MODULES, TOKENIZER
from inflight.errors import ConfigurationError

AUTO, NONE = "auto", "none"
KIND = "LogitScore"
"""At the end of the name of sentence-transformers' class."""
MOST = 2


class ScoreTokens(msgspec.Struct, frozen=True):
    yes: int
    no: int | None = None
    """None = the logit of `yes` is the score, else it is that less the one of `no`."""

    @property
    def ids(self) -> tuple[int, ...]:
        return (self.yes,) if self.no is None else (self.yes, self.no)


def find_score_tokens(asked: str, checkpoint: Path, tokenizer: Path) -> ScoreTokens | None:
    """`asked`: the key score_tokens. `tokenizer`: folder of the tokenizer. None = the checkpoint is no such reranker.
    Raises ConfigurationError."""
    if asked == NONE:
        return None
    if asked != AUTO:
        return _by_words([word.strip() for word in asked.split(",")], tokenizer)
    words = _object(checkpoint / CONFIG).get("classifier_from_token")
    if isinstance(words, list) and words:
        return _by_words([str(word) for word in words], tokenizer)
    return _of_module(checkpoint)


def _by_words(words: list[str], tokenizer: Path) -> ScoreTokens:
    if not 1 <= len(words) <= MOST or not all(words):
        raise ConfigurationError(
            "score_tokens must be auto, none, or tokens of the vocabulary with a comma between: that of a bad answer "
            f"and that of a good one, or the latter alone, got {', '.join(words)!r}"
        )
    if len(set(words)) < len(words):
        raise ConfigurationError(f"score_tokens names the token {words[0]!r} twice, so that every score would be equal")
    numbers = _numbers(tokenizer / TOKENIZER)
    unknown = [word for word in words if word not in numbers]
    if unknown:
        raise ConfigurationError(
            f"score_tokens: {tokenizer / TOKENIZER} has no token {unknown[0]!r}; spell it as it stands there"
        )
    *no, yes = (numbers[word] for word in words)
    return ScoreTokens(yes=yes, no=no[0] if no else None)


def _numbers(path: Path) -> dict[str, int]:
    """Of the tokens in a tokenizer.json."""
    values = _object(path)
    model = values.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        found = dict(vocabulary)
    elif isinstance(vocabulary, list):  # of a Unigram: pairs of a token and its score
        found = {entry[0]: number for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    added = values.get("added_tokens")
    for each in added if isinstance(added, list) else ():
        if isinstance(each, dict) and isinstance(each.get("content"), str) and type(each.get("id")) is int:
            found[each["content"]] = each["id"]
    return found


def _of_module(checkpoint: Path) -> ScoreTokens | None:
    modules = _json(checkpoint / MODULES)
    found = [
        each
        for each in (modules if isinstance(modules, list) else ())
        if isinstance(each, dict) and str(each.get("type")).rpartition(".")[2] == KIND
    ]
    if not found:
        return None
    if str(PurePosixPath(str(found[0].get("path")), CONFIG)) != LOGIT_SCORE:
        raise ConfigurationError(f"{checkpoint / MODULES}: the folder of its {KIND} must be the one of {LOGIT_SCORE}")
    path = checkpoint / LOGIT_SCORE
    values = _object(path)
    yes, no = values.get("true_token_id"), values.get("false_token_id")
    if type(yes) is not int or not (no is None or type(no) is int):
        raise ConfigurationError(
            f"{path} has no true_token_id, a number, beside a false_token_id, a number or null: set score_tokens"
        )
    return ScoreTokens(yes=yes, no=no)


def _object(path: Path) -> dict[str, Any]:
    """{} if there is none."""
    values = _json(path)
    return values if isinstance(values, dict) else {}


def _json(path: Path) -> Any:
    """None if there is no such file. Raises ConfigurationError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ConfigurationError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
