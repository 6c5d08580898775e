"""The library of compiled layers: made once, kept privately, refused with one sentence, and what it packs.

Run: pytest ci/unit/kernels/test_native_library.py
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from compiled_network import Network, config_of, needs_compiler
from kept_libraries import copy_libraries
from tiny_checkpoints import TinyCheckpoint, make_checkpoint

from inflight.distributed.parallel_groups import ParallelGroups
from inflight.errors import ConfigurationError
from inflight.models.compiled import compile_network
from inflight.models.decoder import Decoder
from inflight_kernels import cpu
from inflight_kernels.cache_folder import cache_folder
from inflight_kernels.cpu import (
    VARIANTS,
    HugePageArena,
    Instructions,
    LibraryUnavailable,
    Variant,
    huge_pages,
    library,
    load_collectives,
    load_library,
    pack_weight,
    unsupported_reason,
    variants,
    variants_here,
)
from inflight_kernels.cpu.prebuilt import build, sources

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_threads")]


@pytest.fixture(scope="module")
def cache_of_all() -> Path:
    """That of other tests."""
    return cache_folder("cpu").parent


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, cache_of_all: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("libraries")
    best = variants_here()[:1]
    copy_libraries(
        folder, [*((each, torch.float32) for each in best), *((each, torch.bfloat16) for each in variants_here())]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFLIGHT_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama-wide", dtype=torch.bfloat16)


@needs_compiler
def test_what_cannot_be_packed_is_refused() -> None:
    library = load_library()
    with pytest.raises(ValueError, match="cannot pack"):
        pack_weight(library, torch.zeros(32, 32), HugePageArena())


def test_what_an_arena_gives_lies_in_its_regions_apart() -> None:
    arena = HugePageArena()
    taken = [arena.take(15, torch.float32), arena.take(7, torch.bfloat16), arena.take(3, torch.float32)]
    assert [len(tensor) for tensor in taken] == [15, 7, 3]
    assert all(tensor.data_ptr() % 64 == 0 and not tensor.any() for tensor in taken)
    assert taken[0].untyped_storage().data_ptr() == taken[1].untyped_storage().data_ptr()
    taken[0].fill_(1.0)
    assert not taken[1].any() and not taken[2].any()
    assert arena.take(300 * 2**20, torch.uint8).shape == (300 * 2**20,)  # more than a region holds


@needs_compiler
def test_the_second_time_nothing_is_compiled(checkpoint: TinyCheckpoint, cache: Path) -> None:
    def list_libraries() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in Path(cache, "cpu").iterdir()}

    load_library()
    before = list_libraries()
    load_library()
    assert before and list_libraries() == before
    assert Path(cache, "cpu").stat().st_mode & 0o077 == 0


@needs_compiler
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, torch.bfloat16) for variant in VARIANTS),
        (variants.AVX2, torch.float32),
        (variants.AVX2, torch.float16),
    ],
    ids=str,
)
def test_the_compiler_has_nothing_to_say(
    variant: Variant, dtype: torch.dtype, cache_of_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this processor has. It says the same each time, so what other tests compiled is taken as well."""
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(cache_of_all))
    compiled = library.compiled_file("program", library.program_options(variant, dtype))
    assert compiled.with_suffix(".log").read_text() == ""


@needs_compiler
def test_what_the_compiler_says_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "program.cpp").write_text("static int nobody_calls_it() { return 1; }\n")
    monkeypatch.setattr(library, "_SOURCES", tmp_path / "sources")
    compiled = library.compiled_file("program", ())
    assert "nobody_calls_it" in compiled.with_suffix(".log").read_text()


@pytest.mark.parametrize(("name", "reason"), [("llama", "which is not a multiple of 32")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_network_that_is_not_supported_is_refused_only_if_compiling_was_asked_for(
    tmp_path: Path,
    name: str,
    dtype: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If it was not, the log says why torch computes."""
    monkeypatch.setattr(cpu, "unsupported_reason", lambda: "")
    checkpoint = make_checkpoint(tmp_path / "checkpoint", name, dtype=torch.bfloat16)
    network = Network.load(checkpoint, "false", dtype)
    arguments = (network.decoder, network.cache.states, torch.device("cpu"), ParallelGroups())
    caplog.set_level("INFO", "inflight")
    assert compile_network(config_of(checkpoint, "auto", dtype=dtype), *arguments) is network.decoder
    told = [line for line in caplog.messages if line.startswith("the layers run in torch, several times slower: ")]
    assert [line.endswith(reason) for line in told] == [True]
    with pytest.raises(ConfigurationError, match=f"cpu_compile is true, but .*{re.escape(reason)}"):
        compile_network(config_of(checkpoint, "true", dtype=dtype), *arguments)


def test_a_missing_compiler_or_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "processor_flags", lambda: variants.AVX2.needs)
    monkeypatch.setenv("CXX", "no-such-compiler -pipe")
    missing = "no library was built ahead for this processor, and "
    assert unsupported_reason() == missing + "CXX names no program: no-such-compiler -pipe"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert unsupported_reason() == missing + "no C++ compiler was found; install g++"
    with pytest.raises(LibraryUnavailable, match="no library was built ahead for this processor, and no C"):
        load_library()
    for module in (variants, library):
        monkeypatch.setattr(module, "processor_flags", lambda: frozenset({"avx2"}))
    assert unsupported_reason() == "this processor has no f16c, fma"
    monkeypatch.setattr(library, "VARIANTS", ())
    assert unsupported_reason() == f"there are no layers in C++ for {platform.machine()}"


@pytest.mark.parametrize(
    ("machine", "line", "expected"),
    [
        ("x86_64", "flags\t\t: fpu sse2 f16c fma avx2 avx_vnni", [variants.AVX2_VNNI, variants.AVX2]),
        ("x86_64", "flags\t\t: fpu sse2 avx2", []),
        ("aarch64", "Features\t: fp asimd evtstrm aes", [variants.NEON]),
        ("aarch64", "Features\t: fp asimd atomics asimddp", [variants.NEON_DOTPROD, variants.NEON]),
    ],
)
def test_a_processor_has_variants_of_its_architecture(
    machine: str, line: str, expected: list[Variant], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(variants, "_PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setattr(variants, "VARIANTS", variants.OF_MACHINES[machine])
    assert variants_here() == expected


@needs_compiler
def test_a_compiler_that_fails_leaves_torch(
    checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'program.cpp:1: error: out of ideas' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(LibraryUnavailable, match="out of ideas"):
        load_library()
    with pytest.raises(ConfigurationError, match="out of ideas"):
        Network.load(checkpoint, "true", "bfloat16")
    with caplog.at_level("WARNING"):
        assert isinstance(Network.load(checkpoint, "auto", "bfloat16").decoder, Decoder)
    assert "out of ideas" in caplog.text
    assert not list(tmp_path.glob("*.so"))


@needs_compiler
def test_a_cache_that_cannot_be_kept_leaves_torch(
    checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level("WARNING"):
        assert isinstance(Network.load(checkpoint, "auto", "bfloat16").decoder, Decoder)
    assert "cannot be kept or loaded" in caplog.text
    with pytest.raises(ConfigurationError, match="cannot be kept or loaded"):
        Network.load(checkpoint, "true", "bfloat16")


@needs_compiler
def test_no_library_is_loaded_from_a_folder_that_others_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu").chmod(0o777)
    with pytest.raises(LibraryUnavailable, match="others may write to it; chmod 700 it"):
        load_library()
    (tmp_path / "cpu").chmod(0o700)
    monkeypatch.setattr(library.os, "geteuid", lambda: 12345)
    with pytest.raises(LibraryUnavailable, match="belongs to another user"):
        load_library()


@needs_compiler
def test_no_home_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFLIGHT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(library.os.path, "expanduser", lambda path: path)  # as for a user whom the system does not know
    with pytest.raises(LibraryUnavailable, match="set INFLIGHT_CACHE_DIR"):
        load_library()


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "foreign"])
def test_a_damaged_library_is_made_anew_and_never_loaded(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever library: this one takes the least time to compile."""
    other = Path(load_library().functions._name).read_bytes()[:-1]
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path))
    load_collectives()
    [kept] = tmp_path.glob("cpu/*.so")
    content = kept.read_bytes()
    middle = len(content) // 2
    kept.unlink()  # what is loaded stays mapped
    kept.write_bytes(
        {
            "cut": content[:middle],
            "empty": b"",
            "changed": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "foreign": other,
        }[damage]
    )
    load_collectives()
    assert kept.read_bytes() == content


@needs_compiler
def test_of_ranks_that_start_together_one_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, started = tmp_path / "noting", tmp_path / "started"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *\' -o \'*) echo once >> {started};; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path))
    with ThreadPoolExecutor(3) as ranks:
        loaded = [ranks.submit(load_collectives) for _ in range(3)]
    assert len({each.result()._name for each in loaded}) == 1
    assert started.read_text() == "once\n"


@pytest.fixture
def prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library that a wheel has for this machine and float32. The cache has one, too."""
    [source] = [each for each in sources("here") if each.shown.endswith("float32")]
    (tmp_path / "libraries").mkdir()
    built = build(source, tmp_path / "libraries")
    monkeypatch.setattr(library, "_PREBUILT", built.parent)
    return built


def remove_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")


@needs_compiler
@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_wheels_library_is_taken_and_nothing_compiled(
    has_compiler: bool, prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path / "cache"))
    if not has_compiler:
        remove_compiler(monkeypatch)
    assert unsupported_reason() == ""
    assert load_library(torch.float32).functions._name == str(prebuilt)
    assert [*tmp_path.rglob("*.so")] == [prebuilt]


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_wheels_library_that_is_damaged_is_told_once_and_compiled(
    damage: str, prebuilt: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Path(load_collectives()._name) if damage == "foreign" else prebuilt
    content = whole.read_bytes()[:-1]
    prebuilt.write_bytes(content)
    for _ in range(2):
        loaded = load_library(torch.float32).functions._name
        assert Path(loaded).parent == cache / "cpu"
    assert caplog.text.count(f"{prebuilt} is damaged and is not loaded") == 1
    assert prebuilt.read_bytes() == content
    remove_compiler(monkeypatch)
    reason = f"{prebuilt} is damaged, and no C++ compiler was found"
    assert unsupported_reason().startswith(reason)
    monkeypatch.setenv(variants.VARIABLE, variants_here()[0].name)  # else lower ones are missing, too
    with pytest.raises(LibraryUnavailable, match=re.escape(reason)):
        load_library(torch.float32)


@needs_compiler
def test_what_is_measured_of_a_wheels_library_is_kept_in_the_cache_if_there_can_be_one(
    prebuilt: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = library.program_options(variants_here()[0], torch.float32)
    loaded, kept = library._load("program", library._PROGRAM, options)
    assert (loaded._name, kept) == (str(prebuilt), cache / "cpu" / prebuilt.name)
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path / "file"))
    assert load_library(torch.float32).functions._name == str(prebuilt)


def test_a_wheel_has_the_variants_that_are_asked_for() -> None:
    types = ["float32", "float16", "bfloat16", "collectives"]
    assert [source.shown for source in sources("all")] == [f"{each}, {name}" for each in VARIANTS for name in types]
    assert [source.shown for source in sources("avx2")] == [f"avx2, {name}" for name in types]
    assert sources("none") == []
    with pytest.raises(ValueError, match="or some of amx, avx512_bf16, avx512, avx2_vnni, avx2; got 'sse2'"):
        sources("avx2,sse2")


@needs_compiler
def test_an_older_compiler_builds_a_lower_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "old"
    compiler.write_text(
        "#!/bin/sh\ncase \"$*\" in *-mavx512* | *-mavxvnni*) echo 'error: unrecognized option' >&2; exit 1;; esac\n"
        'exec g++ "$@" -O0\n'  # which takes less time
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert load_library().variant is variants.AVX2


@needs_compiler
def test_the_environment_forces_a_variant(checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in variants_here():
        monkeypatch.setenv(variants.VARIABLE, variant.name)
        assert load_library().variant is variant
    monkeypatch.setenv(variants.VARIABLE, "sse2")
    with pytest.raises(
        ConfigurationError, match="must be one of amx, avx512_bf16, avx512, avx2_vnni, avx2, got 'sse2'"
    ):
        Network.load(checkpoint, "true", "bfloat16")
    monkeypatch.setattr(variants, "processor_flags", lambda: variants.AVX2.needs)
    monkeypatch.setenv(variants.VARIABLE, "avx512")
    with pytest.raises(LibraryUnavailable, match="is avx512, and this processor has no avx512bw, avx512dq, avx512f"):
        load_library()


@needs_compiler
def test_a_variant_whose_products_are_wrong_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def are_right(functions: CDLL, dtype: torch.dtype, chosen: Instructions) -> bool:
        return next(results) and real(functions, dtype, chosen)

    real, results = library.are_right, iter([False, True])
    monkeypatch.setattr(library, "are_right", are_right)
    candidates = variants_here()
    if len(candidates) == 1:
        with pytest.raises(LibraryUnavailable, match="does not multiply rightly by avx2"):
            load_library()
    else:
        assert load_library().variant is candidates[1]
    assert f"does not multiply rightly by {candidates[0].name}" in caplog.text


def test_a_kernel_without_huge_pages_gives_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages.mmap, "MADV_HUGEPAGE", 10**6, raising=False)
    assert HugePageArena().take(8, torch.float32).shape == (8,)
