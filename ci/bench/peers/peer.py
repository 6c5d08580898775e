"""The engines that are compared, as data: how each is installed, given the checkpoint, and started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    worker: str
    """A script in WORKERS, called with the model's path and the format. It loads the model and speaks protocol.py."""
    formats: tuple[str, ...]
    """What it can be asked to compute in."""
    convert: str = ""
    """A script in WORKERS, called with the checkpoint, the file or folder to write, and the format; empty = the
    checkpoint is read as it is."""
    converts_gguf: bool = False
    """Whether that script is called with the checkpoint as a GGUF file of bfloat16."""
    requirements: tuple[str, ...] = ()
    """pip's, of an environment of its own; none = this process's own."""
    unwanted: tuple[str, ...] = ()
    """Packages that the requirements bring and that are removed again."""
    build: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the installation."""
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables of the worker, by the name of what they make it use."""


def _llama_cpp(name: str, instructions: str) -> Peer:
    """Weights of 4 and 8 bits are repacked when they are loaded, as is its default."""
    switches = ("LLAVA_BUILD", "MTMD_BUILD", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER")
    options = " ".join([instructions, *(f"-D{switch}=OFF" for switch in switches)])
    return Peer(
        name,
        worker="llama_cpp_worker.py",
        formats=("bf16", "f16", "q8_0", "q4_0"),
        convert="llama_cpp_convert.py",
        converts_gguf=True,
        requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.4.6"),
        build={"CMAKE_ARGS": options, "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
    )


INFLIGHT = Peer(
    "inflight",
    worker="inflight_worker.py",
    formats=tuple(
        f"{dtype}{coded}"
        for dtype in ("float32", "bfloat16", "float16")
        for coded in ("", "+int8", "+int4", "+fp8", "+int8+int8", "+int4+int8")
    ),
    variants={
        **{name: {"INFLIGHT_CPU_VARIANT": name} for name in ("avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx")},
        "torch": {"BENCH_CPU_COMPILE": "false"},
    },
)
PEERS = {
    peer.name: peer
    for peer in (
        INFLIGHT,
        _llama_cpp("llama.cpp", "-DGGML_NATIVE=ON"),
        _llama_cpp("llama.cpp-avx2", "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"),
        Peer(
            "openvino-genai",
            worker="openvino_worker.py",
            formats=("f32", "bf16", "int8"),
            convert="openvino_convert.py",
            requirements=(
                "openvino==2026.4.1",
                "openvino-genai==2026.4.1.0",
                "optimum-intel==2.2.0",
                "nncf==3.4.0",
                "torch==2.13.0",
                "transformers==5.5.4",
            ),
            # Nothing here uses it, and its build for GPUs cannot be imported beside a torch for CPUs.
            unwanted=("torchvision",),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer in one configuration."""

    peer: Peer
    format: str
    variant: str = ""
    """One of the peer's; empty = what it chooses."""

    @classmethod
    def of(cls, words: str) -> Contender:
        """PEER:FORMAT[:VARIANT]. Raises ValueError with what there is instead."""
        name, _, rest = words.partition(":")
        form, _, variant = rest.partition(":")
        if name not in PEERS:
            raise ValueError(f"{words}: the peer must be one of {', '.join(PEERS)}")
        peer = PEERS[name]
        if form not in peer.formats:
            raise ValueError(f"{words}: the format must be one of {', '.join(peer.formats)}")
        if variant and variant not in peer.variants:
            raise ValueError(f"{words}: the variant must be one of {', '.join(peer.variants) or 'none'}")
        return cls(peer, form, variant)

    def __str__(self) -> str:
        return ":".join(word for word in (self.peer.name, self.format, self.variant) if word)
