"""A text that is mostly known beforehand, such as a file in which something is changed: drafts are verified, several at
a time, instead of generated one by one. The tokens are the same.

python client/examples/drafts.py [localhost:8001]
"""

from __future__ import annotations

import sys

from inflight_client import Client

PROMPT = "Once upon a time"

with Client(*sys.argv[1:2]) as client:
    plain = client.generate(PROMPT, max_tokens=48, temperature=0.0)
    drafted = client.generate(
        PROMPT, max_tokens=48, temperature=0.0, draft_input_ids=plain.token_ids, return_perf_metrics=True
    )
    assert drafted.token_ids == plain.token_ids
    print(f"{drafted.total_accepted_draft_tokens} of {drafted.total_draft_tokens} drafts were accepted")
    copied = client.generate(plain.text * 2, max_tokens=48, max_draft_len=8, return_perf_metrics=True)
    print(f"looked up in the prompt: {copied.total_accepted_draft_tokens} of {copied.total_draft_tokens}")
    ahead = client.generate(
        PROMPT,
        max_tokens=48,
        temperature=0.0,
        lookahead_window_size=4,
        lookahead_ngram_size=3,
        lookahead_verification_set_size=4,
        return_perf_metrics=True,
    )
    assert ahead.token_ids == plain.token_ids
    print(f"guessed by lookahead decoding: {ahead.total_accepted_draft_tokens} of {ahead.total_draft_tokens}")
