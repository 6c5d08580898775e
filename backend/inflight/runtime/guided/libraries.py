"""Which library follows the guides of an engine (`guided_decoding_backend`)."""

from __future__ import annotations

import os
from importlib.util import find_spec

from inflight.errors import ConfigurationError
from inflight.guided_decoding import GuidedDecodingBackend
from inflight.runtime.guided.grammars import MakeLibrary
from inflight.runtime.guided.library import GrammarLibrary
from inflight.runtime.guided.vocabulary import Vocabulary

MAX_THREADS = 8
"""That find the masks of a step beside a GPU. On a CPU all cores are the network's, and one thread suffices."""


def make_library(backend: GuidedDecodingBackend, device_type: str) -> MakeLibrary:
    """The library is imported when it is made: XGrammar takes seconds. Raises ConfigurationError if it is not
    installed."""
    if backend is GuidedDecodingBackend.XGRAMMAR and find_spec("xgrammar") is None:
        raise ConfigurationError(
            "guided_decoding_backend is xgrammar, which is not installed: pip install 'inflight[xgrammar]', or leave "
            "the key out"
        )

    def of_llguidance(vocabulary: Vocabulary) -> GrammarLibrary:
        from inflight.runtime.guided.llguidance_library import LlguidanceLibrary

        num_cores = len(os.sched_getaffinity(0))
        return LlguidanceLibrary(vocabulary, 1 if device_type == "cpu" else min(MAX_THREADS, num_cores))

    def of_xgrammar(vocabulary: Vocabulary) -> GrammarLibrary:
        from inflight.runtime.guided.xgrammar_library import XgrammarLibrary

        return XgrammarLibrary(vocabulary)

    return of_xgrammar if backend is GuidedDecodingBackend.XGRAMMAR else of_llguidance
