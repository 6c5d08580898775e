"""Three continuations of one prompt, streamed side by side. The server computes the prompt once.

python client/examples/several_sequences.py [localhost:8001]
"""

from __future__ import annotations

import sys

from inflight_client import Client

with Client(*sys.argv[1:2]) as client:
    options = {"max_tokens": 32, "temperature": 1.0, "seed": 7, "num_return_sequences": 3}
    with client.stream("Once upon a time", **options) as stream:
        for chunk in stream:
            print(f"{chunk.sequence_index}: {chunk.text!r}")
    for number, sequence in enumerate(stream.completion.sequences):
        print(f"\nsequence {number} ({sequence.finish_reason}): {sequence.text}")
