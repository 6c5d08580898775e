"""The two likeliest of four beams, with their log probabilities: those of transformers' generate(num_beams=4).

python client/examples/beam_search.py [localhost:8001]
"""

from __future__ import annotations

import sys

from inflight_client import Client

with Client(*sys.argv[1:2]) as client:
    answer = client.generate(
        "Once upon a time", max_tokens=24, beam_width=4, num_return_sequences=2, return_log_probs=True
    )
    for sequence in answer.sequences:
        print(f"{sequence.cum_log_probs:8.3f}  {sequence.text!r}")
