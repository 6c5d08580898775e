"""`make demo-survival`: a rank is killed with SIGKILL in the middle of a streamed JSON answer, and the stream goes on.

Starts a server of the default model, asks it for the same sampled answer twice, kills a rank during the second one and
compares the bytes. In float32, in which a token computed again has the very same value.

    make demo-survival ARGS="--ranks 2 --kill 1"     two ranks, of which the second is killed
    make demo-survival ARGS="--spares 0"             no loaded ranks wait to take over: others are started
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from inflight.executor.wire.address import EngineAddress
from inflight.executor.wire.launch import RANK_NOTE
from inflight_client import Client

HELPERS = Path(__file__).parent / "helpers"
PROMPT = "There were three girls."
GIRL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "duck"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
}
GIRLS = {"type": "array", "items": GIRL, "minItems": 3, "maxItems": 3}
OPTIONS = {
    "max_tokens": 500,
    "temperature": 1.0,
    "seed": 7,
    "bad_words": ["\n"],  # JSON may have any white space between its parts, and this model likes it
    "guided_decoding_guide_type": "json_schema",
    "guided_decoding_guide": json.dumps(GIRLS),
}
NUM_CHUNKS = 20
"""After which the rank is killed."""
STAGES = {
    "the engine llm is lost": "the ranks are lost",
    "spare ranks take over": "loaded spares take over",
    "inflight.models.": "a new rank has started and loads the model",
    "inflight.worker] ready": "it is loaded",
    " connected": "the front is connected; it sends the answer so far again",
}
"""What the log says meanwhile, and what that means."""
SPARES = "inflight_engine_spares"


def main(arguments: list[str]) -> int:
    options = argparse.ArgumentParser(prog="make demo-survival")
    options.add_argument("--ranks", type=int, default=1, help="ranks of the engine")
    options.add_argument("--kill", type=int, default=0, help="number of the rank that is killed")
    options.add_argument("--spares", type=int, default=1, help="loaded sets of ranks that wait to take over")
    chosen = options.parse_args(arguments)
    if not 0 <= chosen.kill < chosen.ranks:
        options.error(f"--kill must be the number of a rank, below {chosen.ranks}")
    sys.path.insert(0, str(HELPERS))
    from server_metrics import Metrics
    from server_process import ServerProcess
    from waiting import until

    print(f"Starting tritonserver and {chosen.ranks} rank(s) …", flush=True)
    parameters = {"dtype": "float32", "tensor_parallel_size": str(chosen.ranks), "num_threads": "1"}
    if chosen.spares:
        parameters |= {"spare_ranks": str(chosen.spares), "max_tokens_in_paged_kv_cache": "65536"}
    with ServerProcess(parameters=parameters) as server, Client(server.grpc_url) as client:
        print(f"\nAn undisturbed answer, sampled with seed {OPTIONS['seed']}:\n", flush=True)
        undisturbed, _ = ask(client, None)
        if chosen.spares:
            print("\nWaiting until the spare ranks are loaded …", flush=True)
        until(lambda: Metrics(server).of(SPARES) == chosen.spares, "spare ranks are loaded")
        pid = find_rank(server.ready_endpoints.run_directory, chosen.kill)
        print(f"\nThe same request again; process {pid}, rank {chosen.kill}, is about to die:\n", flush=True)
        disturbed, pause = ask(client, pid, lambda: server.log)
    which = "spare" if chosen.spares else "new"
    print(f"\nThe stream paused for {pause:.1f} s until {which} ranks went on, and its client saw no error.")
    if disturbed != undisturbed:
        print(f"The answers DIFFER: {len(undisturbed.encode())} and {len(disturbed.encode())} bytes.")
        return 1
    print(f"The {len(undisturbed.encode())} bytes of both answers are equal. As JSON:")
    print(json.dumps(json.loads(disturbed), ensure_ascii=False))
    return 0


def ask(client: Client, victim: int | None, read_log: Callable[[], str] = str) -> tuple[str, float]:
    """Stream an answer to the screen and return it, with the longest time in seconds between two of its chunks.
    `victim`: process to kill in the middle. `read_log`: the server's log: it tells what the stream waits for."""
    text, pause, before = "", 0.0, time.monotonic()
    went_on = threading.Event()
    with client.stream(PROMPT, **OPTIONS) as stream:  # type: ignore[arg-type]
        for number, chunk in enumerate(stream, 1):
            pause, before = max(pause, time.monotonic() - before), time.monotonic()
            if number > NUM_CHUNKS:
                went_on.set()
            text += chunk.text
            print(chunk.text, end="", flush=True)
            if number == NUM_CHUNKS and victim is not None:
                arguments = (read_log, len(read_log()), went_on)
                os.kill(victim, signal.SIGKILL)
                print(" [kill -9] ", end="", flush=True)
                threading.Thread(target=tell_stages, args=arguments, daemon=True).start()
    print()
    return text, pause


def tell_stages(read_log: Callable[[], str], begin: int, went_on: threading.Event) -> None:
    """Show what the stream waits for, by the log from `begin` on, until it goes on."""
    began, told = time.monotonic(), set()
    while not went_on.wait(0.05):
        log = read_log()[begin:]
        for words, stage in STAGES.items():
            if words in log and stage not in told:
                told.add(stage)
                print(f"[{time.monotonic() - began:.1f} s: {stage}] ", end="", flush=True)


def find_rank(run_directory: Path, rank: int) -> int:
    """The process of a rank that serves."""
    socket_path = EngineAddress.of("llm", run_directory).resolve()
    assert socket_path is not None, "the engine serves"
    return int(socket_path.with_name(f"{RANK_NOTE}{rank}").read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
