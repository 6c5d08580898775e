"""Model Analyzer as a program of its own, which sends the key of a server's repository API.

    python -m inflight_client.analyze.program profile -f FILE       (the key in the environment: INFLIGHT_API_KEY)

Model Analyzer has no option for headers of its own connection; tritonclient, which it uses, takes a plugin that adds
them to every call.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from inflight_client.analyze.target import KEY_HEADER, KEY_VARIABLE


def main() -> None:
    from model_analyzer import entrypoint
    from model_analyzer.triton.client.grpc_client import TritonGRPCClient
    from tritonclient.grpc import InferenceServerClientPlugin

    # Not inherited by perf_analyzer, which needs none.
    key = os.environ.pop(KEY_VARIABLE, "")

    class Key(InferenceServerClientPlugin):  # type: ignore[misc]
        def __call__(self, request: Any) -> None:
            request.headers[KEY_HEADER] = key

    class ClientWithKey(TritonGRPCClient):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._client.register_plugin(Key())

    if key:
        entrypoint.TritonClientFactory.create_grpc_client = staticmethod(ClientWithKey)
    sys.argv[0] = "model-analyzer"
    entrypoint.main()


if __name__ == "__main__":
    main()
