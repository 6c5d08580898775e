"""Whether the engine can serve a checkpoint, as far as its config.json alone shows: a program for those who are about
to fetch the weights.

    echo '{"gpt_model_path": "FOLDER", …}' | python -m inflight.models.servable

reads the engine's parameters, and ends with 2 and one sentence on standard output if it cannot.
"""

from __future__ import annotations

import json
import sys

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.models.implementation import read_config


def main() -> int:
    try:
        read_config(EngineConfig.from_parameters(json.load(sys.stdin)))
    except ConfigurationError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
