"""python -m inflight.openai FILE: an OpenAI server with the options in FILE, which `inflight serve` wrote."""

from __future__ import annotations

import sys
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.garbage_pause import no_collections
from inflight.openai_options import OpenAIOptions

WRONG = 2


def main(path: str) -> int:
    with no_collections():
        from inflight.openai.serve import serve
    try:
        serve(OpenAIOptions.read(Path(path)))
    except ConfigurationError as error:
        print(f"inflight: {error}", file=sys.stderr, flush=True)
        return WRONG
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
