"""The program of the vision process: `python -m inflight.vision.worker FD SETTINGS`, with the settings as JSON.

It answers on the socket FD, which it has from the program that started it, and ends with that program, when a picture
takes too long, or by whatever a hostile file does to it: its program then starts another one. It has a lower priority
than the ranks, which share its cores.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from transformers.utils import logging as transformers_logging

from inflight.errors import ConfigurationError
from inflight.parent_watch import die_with_parent
from inflight.prompt_tuning import EmbeddingTable, EmbeddingType
from inflight.vision.messages import LOAD_SECONDS, Answer, Ready, See, Unusable, encoder, see_decoder, settings_decoder
from inflight.vision.opening import BadImage, open_image
from inflight.vision.seen import Picture, Unreadable
from inflight.vision.tower import SeenImage, Tower

if TYPE_CHECKING:
    from PIL.Image import Image

NICENESS = 10
"""As that of spare ranks: a busy core then gives about a tenth of its time to this process."""
WORKING_BYTES = 8 * 2**30
"""Of address space for a picture, besides what the process has when it is loaded."""
NO_PILLOW = "images need Pillow in this environment: pip install 'inflight[images]'"
NO_MEMORY = "can't allocate memory"
"""In torch's sentence about it."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Sight(Protocol):
    def see(self, image: Image) -> SeenImage:
        """See Tower."""


def serve(connection: Connection, tower: Tower, max_pixels: int, max_seconds: float) -> None:
    """Answer until the other end is closed."""
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send_bytes(encoder.encode(Ready(image_token=tower.image_token)))
        while True:
            see = see_decoder.decode(connection.recv_bytes())
            # Its default action ends the process wherever it is, also within a decoder written in C.
            signal.setitimer(signal.ITIMER_REAL, max_seconds)
            seen = look(tower, see, max_pixels)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(encoder.encode(seen))


def look(tower: Sight, see: See, max_pixels: int) -> Answer:
    try:
        found = tower.see(open_image(see.data, max_pixels))
    except BadImage as error:
        return Answer(unreadable=Unreadable(why=str(error)))
    except Exception as error:  # of the checkpoint's processor, about this picture
        if isinstance(error, MemoryError) or NO_MEMORY in str(error):
            return Answer(unreadable=Unreadable(why="takes too much memory to read"))
        print(f"inflight: a picture could not be read: {type(error).__name__}", file=sys.stderr, flush=True)
        return Answer(unreadable=Unreadable(why="is not taken by the model's image processor"))
    return Answer(picture=Picture(text=found.text, rows=table_of(found.rows_RD, see.dtype)))


def table_of(rows_RD: torch.Tensor, dtype: EmbeddingType) -> EmbeddingTable:
    rounded = rows_RD.to(DTYPES[dtype]).contiguous()
    data = rounded.view(torch.uint8).numpy().tobytes()
    return EmbeddingTable(dtype=dtype, shape=(rounded.shape[0], rounded.shape[1]), data=data)


def bound_memory() -> None:
    """Of what a picture takes, to a multiple of what any within the bounds needs."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + WORKING_BYTES
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or most > limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def main(descriptor: str, settings_json: str) -> None:
    die_with_parent(None)
    # Ctrl-C is the program's: it closes the socket when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    connection, settings = Connection(int(descriptor)), settings_decoder.decode(settings_json)
    signal.setitimer(signal.ITIMER_REAL, LOAD_SECONDS)
    try:
        import PIL  # noqa: F401

        tower = Tower.load(Path(settings.folder))
    except (ConfigurationError, ImportError) as error:
        why = NO_PILLOW if isinstance(error, ImportError) else str(error)
        connection.send_bytes(encoder.encode(Unusable(why=why)))
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    bound_memory()
    serve(connection, tower, settings.max_pixels, settings.max_seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
