"""One prompt with each of the default model's adapters and without any; then an adapter is unloaded.

python client/examples/lora.py [localhost:8001]
"""

from __future__ import annotations

import sys

from inflight_client import Client

with Client(*sys.argv[1:2]) as client:
    client.load_lora("pirate")  # not needed: the first request that names it loads it, too
    for name in ("pirate", "bullets", None):
        answer = client.generate("Once upon a time", max_tokens=24, temperature=0.0, lora_name=name)
        print(f"{name or 'no adapter'}: {answer.text!r}")
    client.unload_lora("pirate")
