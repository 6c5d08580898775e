"""The parts of the bench, in order of their worth: what the time does not suffice for is at the end."""

from __future__ import annotations

from ci.bench.gpu.part import Part

ENGINE = ("jinja2", "msgspec", "numpy", "safetensors", "tokenizers", "transformers", "zmq")
"""Modules of the engine in one process, besides torch and triton, which every part needs."""
PACKAGES = {"zmq": "pyzmq"}
"""Of modules that have another name."""

PARTS = (
    Part(
        name="tests",
        text="make test-gpu: kernels against their references, the engine against transformers",
        run="commands:run_tests",
        most=160,
        least=30,
        needs=(*ENGINE, "pytest"),
        is_timed=False,
    ),
    Part(
        name="tokens",
        text="the same tokens with graphs and without, and those of transformers",
        run="tokens:same_tokens",
        most=160,
        least=20,
        needs=ENGINE,
        is_timed=False,
    ),
    Part(
        name="compiling",
        text="the kernels that the timed engines need, into triton's cache",
        run="compiling:compile_kernels",
        most=160,
        least=20,
        needs=ENGINE,
        is_timed=False,
    ),
    Part(
        name="rates",
        text="bandwidth, products and launches of this device",
        run="machine:measure_rates",
        most=45,
        least=20,
    ),
    Part(
        name="decode",
        text="E1, E8: decode steps of an 8B with graphs",
        run="decode:with_graphs",
        most=110,
        least=30,
        needs=ENGINE,
    ),
    Part(
        name="decode without graphs",
        text="E1, E8: the same, each kernel launched",
        run="decode:without_graphs",
        most=80,
        least=25,
        needs=ENGINE,
    ),
    Part(
        name="timeline",
        text="a plot of one steady second of the 8B with graphs",
        run="timeline:draw",
        most=20,
        least=5,
        needs=(*ENGINE, "matplotlib"),
    ),
    Part(
        name="host",
        text="E9: the host's work of a step",
        run="host:host_work",
        most=25,
        least=8,
        needs=(*ENGINE, "rich"),
    ),
    Part(
        name="requests",
        text="E5, E11, E3: prompts and whole requests of the 8B",
        run="throughput:of_llama",
        most=150,
        least=60,
        needs=ENGINE,
    ),
    Part(
        name="small",
        text="E6, E8: requests and decode steps of a 0.6B",
        run="throughput:of_small",
        most=60,
        least=30,
        needs=ENGINE,
    ),
    Part(
        name="transformers",
        text="E7: against continuous batching of transformers",
        run="peers:transformers_batching",
        most=100,
        least=50,
        needs=ENGINE,
    ),
    Part(
        name="fp8",
        text="E2, E4: decode steps and requests of an fp8 8B",
        run="throughput:of_fp8",
        most=150,
        least=10,
        needs=ENGINE,
    ),
    Part(name="drafts", text="E12: prompt lookup", run="drafts:prompt_lookup", most=60, least=30, needs=ENGINE),
    Part(
        name="experts",
        text="E13: requests of a 30B with experts",
        run="throughput:of_experts",
        most=90,
        least=8,
        needs=ENGINE,
    ),
    Part(
        name="vllm",
        text="E3: the same requests with vLLM",
        run="peers:vllm_output",
        most=150,
        least=90,
        peer="vllm",
    ),
    Part(
        name="kernels",
        text="K1 to K17, beside the libraries that are installed",
        run="commands:bench_kernels",
        most=120,
        least=45,
        needs=("rich",),
    ),
    Part(
        name="tuning",
        text="tuned configurations of the kernels for this device",
        run="commands:tune_kernels",
        most=300,
        least=30,
        needs=("rich",),
    ),
)
