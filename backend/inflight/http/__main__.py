"""python -m inflight.http FILE: an OpenAI server with the options in FILE, which `inflight serve` wrote."""

from __future__ import annotations

import sys
from pathlib import Path

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.front.remote import RemoteFront
from inflight.garbage_pause import no_collections
from inflight.http.engine_front import open_front
from inflight.openai_options import OpenAIOptions

WRONG = 2


def main(path: str) -> int:
    try:
        options = OpenAIOptions.read(Path(path))
        front = _open(options)
        with no_collections():  # beside ranks that load
            from inflight.http.serve import serve
        serve(options, front)
    except ConfigurationError as error:
        print(f"inflight: {error}", file=sys.stderr, flush=True)
        return WRONG
    return 0


def _open(options: OpenAIOptions) -> RemoteFront:
    try:
        return open_front(options)
    except ConfigurationError:
        from inflight.http.model import Model

        # Of files that the front and the tokenizer read, the latter says what is wrong.
        first = options.of_each()[0]
        Model(first, EngineConfig.from_parameters(first.parameters))
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
