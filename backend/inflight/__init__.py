"""inflight: an LLM backend for Triton Inference Server.

The package reads downwards, and each folder imports only from those below it:

    server          tensors <-> Request/Response, inside tritonserver's stub process
    text            text <-> tokens, for the server and for programs that use the engine as a library
    executor        how ranks are launched and reached
    batch_manager   the worker loop of every rank: GptManager, Scheduler, KVCacheManager
    runtime         one device: ModelRunner, Sampler
    models, layers  the networks and their parts
    distributed     communication between ranks

    supervisor      separate from the rest: `inflight serve`, which starts, watches and ends a whole server

The files beside this one (request, result, config, stats, errors, …) are the ground floor: values that all folders
use. Of this package they import only each other.
"""

__version__ = "0.1.0"
