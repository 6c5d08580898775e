"""`make families`: each native family behind `inflight serve`, a small random checkpoint with a tokenizer and a chat
template of the family's style, and what clients of OpenAI and of tensorrtllm_backend get of it beside transformers."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path

HELPERS = Path(__file__).parent / "helpers"


def main(arguments: list[str]) -> int:
    sys.path.insert(0, str(HELPERS))
    from served_family import serve_and_ask
    from tiny_checkpoints import NearTie
    from transformers.utils import logging

    from inflight.models.families import FAMILIES

    options = argparse.ArgumentParser(prog="make families", description=__doc__)
    options.add_argument("families", nargs="*", metavar="ARCHITECTURE", help="only these")
    options.add_argument("--seed", type=int, default=0, help="of the checkpoints' sizes and weights")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the configuration")
    chosen = options.parse_args(arguments)
    if unknown := set(chosen.families) - FAMILIES.keys():
        options.error(f"there is no family {', '.join(sorted(unknown))}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    own = [word for each in chosen.set for word in ("--set", each)]
    began, num_wrong = time.monotonic(), 0
    print(f"{'family':30} {'layers':7} {'ready in s':>10}  agreed", flush=True)
    for architecture in chosen.families or FAMILIES:
        with tempfile.TemporaryDirectory(prefix="inflight-family-") as folder:
            try:
                found = serve_and_ask(Path(folder), architecture, chosen.seed, *own)
                complaints = found.complaints
                row = f"{found.engine:7} {found.seconds:10.1f}"
            except (AssertionError, NearTie, OSError) as error:
                row, complaints = f"{'':18}", [f"{type(error).__name__}: {error}"]
        num_wrong += bool(complaints)
        print(f"{architecture:30} {row}  {'no' if complaints else 'yes'}", flush=True)
        for complaint in complaints:
            print(f"    {complaint[:2000]}", flush=True)
    print(f"{num_wrong} of {len(chosen.families or FAMILIES)} disagreed, in {time.monotonic() - began:.0f} s")
    return 1 if num_wrong else 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
