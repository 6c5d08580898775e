"""A stream that outlives its server: kill tritonserver while it runs, and it goes on behind its last token as soon as
the server is back.

python client/examples/resume.py [localhost:8001]
"""

from __future__ import annotations

import sys

from inflight_client import Client

with (
    Client(*sys.argv[1:2], resume=True, resume_timeout=120) as client,
    client.stream("Once upon a time", max_tokens=96, temperature=1.0) as stream,
):
    for chunk in stream:
        print(chunk.text, end="", flush=True)
print(f"\n[{stream.completion.num_output_tokens} tokens, resumed {stream.num_resumes} times]")
