"""What holds for each kind of state that layers keep: the second table of `ci/FEATURES.md`, with the test that proves
each cell.

`ci/unit/house/test_pages.py` looks for these tests.
"""

from __future__ import annotations

from engine_features import (
    APART,
    BITS,
    CHUNKS_OF_STAGES,
    HISTORIES,
    NETWORKS_OF_RANKS,
)

KINDS_OF_STATE = ("keys and values", "latents", "states of sequences")
RANDOM = "ci/unit/models/test_random_configs.py::test_tokens_are_those_of_transformers"
CODES = "ci/unit/models/test_random_configs.py::test_weights_become_codes"
STATES = "ci/unit/models/test_sequence_states.py::test_bits_depend_on_the_request_alone"
TURNS = "ci/unit/models/test_sequence_states.py::test_texts_that_go_on_start_behind_the_answer"
SEVERAL = "ci/unit/runtime/test_several_sequences.py::test_each_sequence_has_the_tokens_of_a_request_of_its_own"
BEAMS = "ci/unit/runtime/test_beam_search.py::test_beams_are_those_of_transformers"
DRAFTS = "ci/unit/runtime/test_speculation.py::test_drafts_change_nothing_but_the_number_of_steps"
DRAFT_MODEL = "ci/unit/runtime/test_draft_model.py::test_tokens_are_those_without"
DRAFT_STATES = "ci/unit/runtime/test_draft_model.py::test_states_change_no_token"
REPLAY = "ci/unit/runtime/test_engine.py::test_a_request_goes_on_from_the_tokens_that_its_client_has"
CONTEXTS = f"{APART}::test_with_its_first_token_it_only_decodes"
TRAVEL = "ci/unit/executor/test_contexts_apart.py::test_states_of_sequences_travel"
AS_BLOCKS = "as keys and values"
"""Nobody but the layer knows what a block holds."""

STATE_FEATURES: dict[str, tuple[str, str, str]] = {
    "tokens of transformers: in mixed batches, in chunks, after a pause, on a cached prefix": (RANDOM, RANDOM, RANDOM),
    "the same bits in C++, alone and in any batch": (BITS, CODES, STATES),
    "the next turn of a conversation starts behind the answer": (HISTORIES, AS_BLOCKS, TURNS),
    "several sequences of a prompt": (SEVERAL, AS_BLOCKS, SEVERAL),
    "beam search": (BEAMS, AS_BLOCKS, BEAMS),
    "drafts": (DRAFTS, AS_BLOCKS, DRAFTS),
    "drafts of a draft model, which keeps its own": (DRAFT_MODEL, AS_BLOCKS, DRAFT_STATES),
    "requests go on behind what their clients have, as after a death of ranks": (REPLAY, AS_BLOCKS, REPLAY),
    "tensor parallel ranks": (NETWORKS_OF_RANKS, NETWORKS_OF_RANKS, NETWORKS_OF_RANKS),
    "pipeline stages": (CHUNKS_OF_STAGES, CHUNKS_OF_STAGES, CHUNKS_OF_STAGES),
    "cold blocks and states in host memory": (HISTORIES, AS_BLOCKS, STATES),
    "contexts handed over to other ranks": (CONTEXTS, AS_BLOCKS, TRAVEL),
    "reuse of parts of a block": (HISTORIES, AS_BLOCKS, "no: a state is behind whole blocks"),
    "8 bits (`kv_cache_dtype`)": (CODES, CODES, "blocks only: a state stays in float32"),
}
"""Feature -> for each of KINDS_OF_STATE the test that proves it, FILE::FUNCTION, or why there is none."""
