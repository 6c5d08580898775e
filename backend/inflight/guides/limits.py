"""Bounds of the work that a guide may cause: counts, and so the same on every machine. The lengths are bounded in
inflight.guided_decoding."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_EXPANDED = 20_000
"""Characters, sets and references of a guide, each counted as often as the repetitions around it repeat it."""
MAX_RULES = 1_000
"""Rules of a grammar."""
MAX_TERMINAL = 500
"""Expanded parts of a rule that is written into its users, instead of being referred to."""
MAX_TERMINALS = 3_000
"""Places of terminals in a grammar."""
MAX_NEIGHBOURS = 10_000
"""Steps of finding the terminals that may follow each other or stand in one place."""
MAX_RULE_TIMES = 1_000
"""Repetitions within each other, multiplied, of what is no terminal."""
MAX_ROUNDS = 4
"""Times that terminals are cut, before all are cut to characters."""
MAX_FOLDED_RANGE = 1_000
"""Characters of a range whose case is ignored."""
MAX_TRANSLATIONS = 256
"""Translated guides that are kept; each is at most a few times its guide."""

PARSER_LIMITS = LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=400_000,
    step_lexer_fuel=40_000,
    step_max_items=4_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""Of the library, which counts too, its own units of work: of a grammar that is used, with all of a vocabulary.
With these a mask of a vocabulary of 128,000 tokens takes 4.3 ms of one core at most (EPYC, 2026-11-26). Of the official
suite, the corpus of the tests and schemas of the kinds that people use, followed through their valid values, none needs
as much: a few more than 3,000 items, and more than 20,000 units of the lexer for all letters of Unicode."""
CHECK_LIMITS = LLParserLimits(
    max_items_in_row=300,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=20_000,
    step_max_items=5_000,
    max_lexer_states=5_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)
"""Of a grammar that is checked, with a vocabulary of bytes."""
