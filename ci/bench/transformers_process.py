"""The process of transformers_peer, and how it is asked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ci.bench.line_process import LineProcess

THREADS = 2


class TransformersProcess:
    def __init__(self, checkpoint: Path, tokenizer: Path | None = None, adapters: Path | None = None) -> None:
        """`tokenizer`: for batches with grammars. `adapters`: a folder of PEFT folders."""
        arguments = [str(checkpoint), str(tokenizer or checkpoint), str(adapters or ""), str(THREADS)]
        command = [sys.executable, "-W", "ignore", "-m", "ci.bench.transformers_peer", *arguments]
        self._process = LineProcess(command)
        self._process.read()

    def seconds(self, prompts: list[list[int]], num_tokens: int, **options: Any) -> float:
        """How long a batch takes. `options`: further fields of transformers_peer.Batch."""
        return float(self._process.ask({"prompts": prompts, "num_tokens": num_tokens, **options})["seconds"])

    def close(self) -> None:
        self._process.close()
