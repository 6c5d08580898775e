"""Keeps in `ci/golden/references.json` what tests have computed with transformers: the end of `make references`.

The tests ran with INFLIGHT_REFERENCES=keep (`ci/helpers/references.py`). What they no longer ask for is dropped.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

import torch
import transformers
from references import KEPT, NEW


def main() -> int:
    found = dict(json.loads(line) for path in sorted(NEW.glob("*.jsonl")) for line in path.read_text().splitlines())
    if not found:
        print("No test has kept any reference: run make references.", file=sys.stderr)
        return 1
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(found[key])}" for key in sorted(found))
    made_with = json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})
    KEPT.write_text(f'{{\n "made with": {made_with},\n "tokens": {{\n{rows}\n }}\n}}\n', encoding="utf-8")
    shutil.rmtree(NEW)
    print(f"{len(found)} references, {KEPT.stat().st_size // 1024} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
