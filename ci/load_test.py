"""`make load-test`: a server of the default model, and `inflight load-test` against it with the arguments given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).parent / "helpers"))
    from server_process import ServerProcess

    with ServerProcess() as server:
        console = Path(sys.executable).with_name("inflight")
        command = [console, "load-test", "--url", server.grpc_url, "--metrics-url", server.metrics_url, *arguments]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
