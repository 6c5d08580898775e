"""The process of transformers_peer, and how it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

THREADS = 2


class TransformersProcess:
    def __init__(self, checkpoint: Path, tokenizer: Path | None = None, adapters: Path | None = None) -> None:
        """`tokenizer`: for batches with grammars. `adapters`: a folder of PEFT folders."""
        arguments = [str(checkpoint), str(tokenizer or checkpoint), str(adapters or ""), str(THREADS)]
        command = [sys.executable, "-W", "ignore", "-m", "ci.bench.transformers_peer", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def seconds(self, prompts: list[list[int]], num_tokens: int, **options: Any) -> float:
        """How long a batch takes. `options`: further fields of transformers_peer.Batch."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens, **options}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"transformers' process ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
