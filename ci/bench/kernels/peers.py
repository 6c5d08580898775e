"""Which peers are installed. A peer that is missing or broken is a line of the output, never the end of a run.

Modules are looked for in this Python and in `build/peers`, where single files may lie that nobody installs (FA3's
extension, vLLM's Triton attention). Knows no case.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch

from ci.bench.kernels.case import Case, Peer

LOCAL = Path(__file__).resolve().parents[3] / "build" / "peers"


def add_local_peers() -> None:
    """Let modules of `build/peers` be imported, after those that are installed."""
    if LOCAL.is_dir() and str(LOCAL) not in sys.path:
        sys.path.append(str(LOCAL))


def version(module: str) -> str | None:
    """The version of an installed module, "unknown version" where it tells none; None if there is none that imports."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except Exception as error:
        # Packages above a module are imported to find it, and raise what they like.
        print(f"peer {module}: {type(error).__name__}: {error}".splitlines()[0])
        return None
    top = module.partition(".")[0]
    distributions = importlib.metadata.packages_distributions().get(top, [top])
    try:
        return importlib.metadata.version(distributions[0])
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def survey(cases: list[Case]) -> dict[str, str | None]:
    """By module that some case's peer needs, its version or None."""
    needed = {peer.needs for case in cases for peer in case.peers.values()} - {""}
    return {module: version(module) for module in sorted(needed)}


def usable(peer: Peer, device: torch.device, found: dict[str, str | None]) -> bool:
    """Whether the peer can be called here."""
    installed = not peer.needs or found.get(peer.needs) is not None
    return installed and (peer.on_cpu or device.type == "cuda")
