"""Networks that give vectors or scores of texts and that cannot be served, and why. They are refused by name."""

from __future__ import annotations

from pathlib import Path

from inflight.errors import ConfigurationError

ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification")
"""Of the names of such architectures."""
WRITING = "LMHeadModel"
"""At the end of names of networks that write text."""
NO_CLASS = "no class of transformers computes it, and code of checkpoints is not run"
POSITIONS = "it makes keys of positions by weights of their own, which the second version does not"
REASONS: dict[str, str] = {
    "DebertaModel": POSITIONS,
    "DebertaFor": POSITIONS,
    "New": NO_CLASS,
    "Gte": NO_CLASS,
    "JinaBert": NO_CLASS,
    "RoFormer": "it rotates adjacent elements of each head, which no encoder here does",
    "Longformer": "its attention is sparse",
    "BigBird": "its attention is sparse",
    "T5": "it is the half of a network that reads a text for another one",
}
"""By what names begin with; a clause."""


def refuse_encoder(path: Path, architecture: str, known: tuple[str, ...]) -> None:
    """Raise ConfigurationError if the architecture, which is none of `known`, is such a network. `path`: of
    config.json."""
    if not architecture.endswith(ENDINGS) or architecture.endswith(WRITING):
        return
    found = [reason for beginning, reason in REASONS.items() if architecture.startswith(beginning)]
    why = f": {found[0]}" if found else ""
    raise ConfigurationError(
        f"{path}: {architecture} gives vectors or scores of texts, and this engine has no layers for it{why}; it has "
        f"them for {', '.join(known)}"
    )
