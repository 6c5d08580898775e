"""Benchmarks the kernels against the machine's measured rates and all installed peers; on a CPU, a dry run.

Without a GPU, importing this switches triton's interpreter on, so it must be imported before triton.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError("triton was imported without TRITON_INTERPRET=1, and there is no GPU: the dry run needs it")
    os.environ["TRITON_INTERPRET"] = "1"
    from ci.kernels.interpreter import repair

    repair()
