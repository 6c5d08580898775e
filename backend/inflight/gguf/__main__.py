"""Makes the folder of a checkpoint for a GGUF file, and prints it: python -m inflight.gguf FILE"""

from __future__ import annotations

import sys
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.gguf.folder import make_folder


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m inflight.gguf FILE", file=sys.stderr)
        return 2
    try:
        print(make_folder(Path(sys.argv[1])))
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
