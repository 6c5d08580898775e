"""What sentence-transformers' files in a checkpoint say of the vectors and scores that are made of its outputs.

    modules.json              the parts of the model, each with its folder: the network, then pooling, then lengths of 1
    1_Pooling/config.json     which hidden states are a vector, and whether those of a prompt count
    config_sentence_transformers.json
                              prompts: what stands before a text, by name; and what becomes of a cross-encoder's score
    config.json               where earlier versions say the latter, beside the network's own values

Formats: https://www.sbert.net/docs/package_reference/sentence_transformer/modules.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from inflight.asking.text_prompts import TextPrompts
from inflight.checkpoint_files import CONFIG, MODULES, POOLING, PROMPTS
from inflight.errors import ConfigurationError
from inflight.output_config import Pooling
from inflight.text.safe_text import safe_text

Kind = TypeVar("Kind")
MODES: dict[str, Pooling] = {
    "mean": "mean",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
    "cls": "cls",
    "cls_token": "cls",
    "max": "max",
}
"""By sentence-transformers' names."""
OLD_PREFIX, OLD_ENDING = "pooling_mode_", "_tokens"
"""Earlier versions write a truth value for each mode, such as pooling_mode_mean_tokens."""
COMPUTED = ("Transformer", "Pooling", "Normalize", "LogitScore")
"""Kinds of modules. Normalize gives each vector the length 1, which all of this server's have; LogitScore makes no
vectors, but scores (see score_tokens.py)."""
OF_ONE_TOKEN: tuple[Pooling, ...] = ("cls", "last")
"""Poolings that take one state, which is the same whether or not those of a prompt are left out."""
REMEDY = f"set embedding_pooling to {', '.join(get_args(Pooling))}"


Activation = Literal["sigmoid", "identity"]
"""What becomes of a score: a number from 0 to 1, or the score itself."""
ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
"""By torch's names of modules."""
OLD_ACTIVATION = "sbert_ce_default_activation_function"


class Module(msgspec.Struct, frozen=True):
    type: str
    """Name of a class, with its package."""


class Settings(msgspec.Struct, frozen=True):
    activation_fn: str | None = None
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None


def find_pooling(folder: Path) -> Pooling:
    """The mean where the checkpoint has no such files. Raises ConfigurationError."""
    kinds = [each.type.rpartition(".")[2] for each in _read(folder / MODULES, list[Module]) or []]
    for kind in kinds:
        if kind not in COMPUTED:
            named = safe_text(kind)
            raise ConfigurationError(f"{MODULES} of the checkpoint has a {named}, which is not computed here: {REMEDY}")
    config = _read(folder / POOLING, dict[str, Any])
    if config is None:
        if "Pooling" in kinds:
            raise ConfigurationError(f"{MODULES} of the checkpoint has a Pooling, and {POOLING} is missing: {REMEDY}")
        return "mean"
    found = _modes(config)
    if len(found) != 1 or found[0] not in MODES:
        modes = safe_text(" and ".join(found)) or "nothing"
        raise ConfigurationError(f"{POOLING} of the checkpoint asks for {modes}, which is not computed here: {REMEDY}")
    return MODES[found[0]]


def find_activation(folder: Path) -> Activation:
    """The sigmoid where the checkpoint says nothing, as sentence-transformers' cross-encoders have it. Raises
    ConfigurationError."""
    config = _read(folder / CONFIG, dict[str, Any]) or {}
    own = config.get("sentence_transformers")
    given: Any = _settings(folder).activation_fn
    if given is None:
        given = own.get("activation_fn") if isinstance(own, dict) else None
    given = config.get(OLD_ACTIVATION) if given is None else given
    if given is None:
        return "sigmoid"
    name = str(given).rpartition(".")[2].removesuffix("()")
    if name not in ACTIVATIONS:
        known = " or ".join(ACTIVATIONS)
        raise ConfigurationError(
            f"{CONFIG} of the checkpoint asks for {safe_text(name)} of scores; {known} is computed here"
        )
    return ACTIVATIONS[name]


def find_prompts(folder: Path, *, is_pooling_set: bool) -> TextPrompts:
    """None where the checkpoint has no such file. `is_pooling_set`: the operator has said how vectors are made; that
    holds for the tokens of prompts, too. Raises ConfigurationError."""
    settings = _settings(folder)
    prompts, default = settings.prompts or {}, settings.default_prompt_name
    if default is not None and default not in prompts:
        raise ConfigurationError(
            f"{PROMPTS} of the checkpoint has no prompt of the name that its default_prompt_name is: "
            f"{safe_text(default)}"
        )
    are_pooled = is_pooling_set or not prompts or _pools_prompts(folder)
    return TextPrompts(by_name=prompts, default_name=default, are_pooled=are_pooled)


def _settings(folder: Path) -> Settings:
    return _read(folder / PROMPTS, Settings) or Settings()


def _pools_prompts(folder: Path) -> bool:
    """Whether a vector is what it would be without this, or made of the prompt's tokens, too."""
    given = (_read(folder / POOLING, dict[str, Any]) or {}).get("include_prompt", True)
    if not isinstance(given, bool):
        raise ConfigurationError(f"include_prompt in {POOLING} of the checkpoint is neither true nor false")
    return given or find_pooling(folder) in OF_ONE_TOKEN


def _modes(config: dict[str, Any]) -> list[str]:
    given = config.get("pooling_mode")
    if given is not None:
        names = given if isinstance(given, list) else [given]
        if not all(isinstance(each, str) for each in names):
            raise ConfigurationError(f"pooling_mode in {POOLING} of the checkpoint is no name: {REMEDY}")
        return names
    return [
        name.removeprefix(OLD_PREFIX).removesuffix(OLD_ENDING)
        for name, value in config.items()
        if name.startswith(OLD_PREFIX) and value is True
    ]


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    """None if there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
