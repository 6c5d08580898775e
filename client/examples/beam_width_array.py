"""A beam search that begins wide and ends narrow: eight beams after the first token, four after the second, then two.
Each step costs as many rows of the batch as beams go on.

python client/examples/beam_width_array.py [localhost:8001]
"""

from __future__ import annotations

import sys

from inflight_client import Client

WIDTHS = [8, 4, 2]

with Client(*sys.argv[1:2]) as client:
    options = {"max_tokens": 24, "num_return_sequences": 2, "return_log_probs": True}
    for widths in (WIDTHS, [2]):
        answer = client.generate("Once upon a time", beam_width=max(widths), beam_width_array=widths, **options)
        print(f"beams {widths}:")
        for sequence in answer.sequences:
            print(f"{sequence.cum_log_probs:8.3f}  {sequence.text!r}")
