"""`python -m ci.chaos`: start a server, disturb it for some minutes, and tell whether it kept its promises."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
SAMPLE_SECONDS = 5.0
REST_SECONDS = 120.0
"""Between two looks at a server at rest, for which the load pauses."""


def main(arguments: list[str]) -> int:
    sys.path.insert(0, str(HELPERS))
    from ci.chaos.faults import FAULTS
    from ci.chaos.faults.clients import CLIENTS
    from ci.chaos.sandbox import sandbox

    names = [fault.name for fault in FAULTS]
    options = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0, help="how long faults are injected")
    options.add_argument("--seed", type=int, default=None, help="of load and faults; a random one unless given")
    options.add_argument("--ranks", type=int, default=2, help="ranks of the engine")
    options.add_argument("--spares", type=int, default=0, help="sets of spare ranks")
    options.add_argument("--clients", type=int, default=8, help="streams at a time")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the configuration")
    options.add_argument(
        "--fault", action="append", metavar="NAME", help=f"only this one, repeatable: {'; '.join(names)}"
    )
    options.add_argument(
        "--family",
        default="",
        metavar="ARCHITECTURE",
        help="serve a random checkpoint of this one",
    )
    options.add_argument("--soak", action="store_true", help="only clients misbehave, and nothing is to grow or hang")
    options.add_argument("--no-result", action="store_true", help="write no file to ci/chaos/results")
    chosen = options.parse_args(arguments)
    if chosen.soak:
        chosen.fault = [fault.name for fault in CLIENTS]
    if unknown := set(chosen.fault or ()) - set(names):
        options.error(f"there is no fault {', '.join(map(repr, sorted(unknown)))}")
    if chosen.seed is None:
        chosen.seed = int.from_bytes(os.urandom(2), "big")
    with _family(chosen.family) as checkpoint, sandbox() as place:
        return asyncio.run(_run(chosen, place, checkpoint))


@contextlib.contextmanager
def _family(architecture: str) -> Iterator[Path | None]:
    """A checkpoint of this family, which is removed at the end; None without one."""
    if not architecture:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="inflight-family-") as folder:
        # In a process of its own: the sandbox wants one without threads.
        program = "import sys; from family_checkpoints import write_for_default; write_for_default(*sys.argv[1:])"
        path = os.pathsep.join([str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(
            [sys.executable, "-c", program, folder, architecture], env={**os.environ, "PYTHONPATH": path}, check=True
        )
        yield Path(folder)


async def _run(chosen: argparse.Namespace, place: Any, checkpoint: Path | None) -> int:
    from ci.chaos.actor import Actor
    from ci.chaos.faults import FAULTS
    from ci.chaos.leaks import MIN_SECONDS, Growth, left_behind
    from ci.chaos.load import Load
    from ci.chaos.oracle import Oracle
    from ci.chaos.scene import ChaosFailed, running_server
    from ci.chaos.table import keep, longest_waits, show, summary
    from ci.chaos.workload import workload

    print(f"Starting a server of {chosen.ranks} rank(s); seed {chosen.seed} …", flush=True)
    parameters = dict(each.split("=", 1) for each in chosen.set)
    with running_server(chosen.ranks, chosen.spares, place, parameters, checkpoint) as scene:
        wanted = [fault for fault in FAULTS if fault.name in (chosen.fault or [fault.name])]
        skipped = {fault: why for fault in wanted if (why := fault.missing(scene))}
        oracle = Oracle(scene, exact=scene.is_exact)
        load, growth = Load(scene, oracle.judge, chosen.seed), Growth(scene)
        await scene.wait_until_serving()
        print("Asking every kind of request alone …", flush=True)
        items = await oracle.learn(load, workload(), may_refuse=checkpoint is not None)
        load.asked.clear()
        actor = Actor(scene, load, oracle, [fault for fault in wanted if fault not in skipped], chosen.seed)
        sampling = asyncio.create_task(_sample(growth))
        load.start(chosen.clients, items)
        end = time.monotonic() + 60 * chosen.minutes
        try:
            while (now := time.monotonic()) < end:
                await actor.act(min(end, now + REST_SECONDS))
                await load.settle()
                await oracle.check_rest(load.asked)
                load.go_on()
        except ChaosFailed as error:
            oracle.complain(str(error))
        sampling.cancel()
        await load.stop()
        found = summary(oracle.injections, oracle.verdicts, skipped, growth)
        found["longest waits"] = longest_waits(load, oracle.verdicts)
        code = scene.server.stop()
        if code != 0:
            oracle.complain(f"the supervisor ended with {code}: {scene.server.told[-2000:]}")
    # Of a shorter run a slow machine makes a longer one, whose processes are still warming up.
    grown = growth.complaints() if 60 * chosen.minutes >= MIN_SECONDS else []
    for complaint in [*grown, *(f"left behind: {each}" for each in left_behind(scene))]:
        oracle.complain(complaint)
    found |= {
        "seed": chosen.seed,
        "ranks": chosen.ranks,
        "spares": chosen.spares,
        "minutes": chosen.minutes,
        "complaints": oracle.complaints,
    }
    show(found)
    if not chosen.no_result:
        print(f"kept in {keep(found)}")
    if not oracle.complaints:
        print("Every promise was kept.")
        return 0
    print(f"\n{len(oracle.complaints)} promises were broken:")
    for complaint in oracle.complaints:
        print(f"- {complaint[:1000]}")
    print(f"The same once more: .venv/bin/python -m ci.chaos {shlex.join(_again(chosen))}")
    return 1


def _again(chosen: argparse.Namespace) -> list[str]:
    """The arguments that repeat a run."""
    given = vars(chosen)
    numbers = [f"--{name}={given[name]:g}" for name in ("minutes", "ranks", "spares", "clients", "seed")]
    families = [f"--family={chosen.family}"] if chosen.family else []
    settings = [f"--set={each}" for each in chosen.set]
    return [*numbers, *families, *settings, *(f"--fault={name}" for name in chosen.fault or ())]


async def _sample(growth: Any) -> None:
    while True:
        growth.sample()
        await asyncio.sleep(SAMPLE_SECONDS)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
