"""The kernels against the machine's own rates and every peer found installed; on a CPU, a dry run of all of it.

Importing this chooses triton's interpreter where there is no GPU: it must come before triton itself.
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
