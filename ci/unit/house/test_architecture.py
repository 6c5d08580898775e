"""The house's rules, read from the code: imports go one way, light rooms stay light, nothing unpickles or trusts code.

Rules are functions from a source file to the breaches in it, so that each is also tried on a file that breaks it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import pytest
from sources import FOLDERS, PACKAGES, ROOT, Import, imports_of, module_of

import inflight

TOP = ("server", "http")
"""Rooms at the head of the stairs, which meet in none but those below."""
STAIRS = ("executor", "batch_manager", "runtime", "models", "layers")
"""Each room imports only from rooms further to the right, and from the ground floor."""
BESIDE = {
    # The supervisor watches a server from outside; the ranks' collectives are used where ranks meet.
    "supervisor": frozenset[str](),
    "distributed": frozenset({"executor", "runtime", "models", "layers"}),
    # What a client wants is the same for every server and for programs that use the engine as a library.
    "asking": frozenset({"server", "http", "executor"}),
    # Pictures become embeddings before a request is made; ranks know none.
    "vision": frozenset({"server", "http", "asking"}),
    # Text is for whoever meets people: the two servers, and programs that use the engine as a library. Masks are made
    # of the bytes of tokens.
    "text": frozenset({"server", "http", "asking", "executor", "runtime"}),
    # Guides are translated where requests arrive; the ranks' matchers share the bounds.
    "guides": frozenset({"server", "http", "asking", "executor", "runtime"}),
    # Models are fetched by whoever starts ranks, before it does; ranks only know how to show where one is from.
    "hub": frozenset({"supervisor", "server", "executor", "runtime"}),
    # Folders are made of GGUF files where models are fetched; ranks read the tensors.
    "gguf": frozenset({"hub", "supervisor", "executor", "models"}),
}
"""Rooms off the stairs: who may import them. They import nothing but the ground floor themselves, and each other where
it says so."""
PUBLIC_NAMES = frozenset(inflight.__all__)
WIRE_ENDS = frozenset({"front", "launchers", "rank"})
"""Rooms of the executor that meet only in its `wire`, which imports none of them."""
DIALECTS = frozenset({"openai", "anthropic", "ollama", "cohere"})
ROOF = frozenset({"inflight.http.app", "inflight.http.serve"})
"""Modules of the HTTP server that put its dialects together."""
ENGINE_COMMANDS = frozenset({"inflight_client.engine_commands", "inflight_client.model_arguments"})
"""Modules of the client whose commands run the engine."""
KERNEL_USERS = frozenset({"runtime", "models", "layers", "distributed"})
GROUND = "ground floor"
ENTRANCES = {"inflight.worker": "executor"}
"""Modules beside the ground floor that belong to a room: entry points of its programs."""

# fmt: off
MPI_PICKLES = frozenset({
    "send", "bsend", "ssend", "isend", "ibsend", "issend", "recv", "irecv", "sendrecv", "mprobe", "improbe",
    "bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan",
})
"""mpi4py's lower-case methods: their upper-case namesakes move buffers."""
OBJECT_CALLS = frozenset({
    "send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
})
"""Methods of zmq and torch.distributed that pickle."""
# fmt: on
PICKLERS = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"})


@dataclass(frozen=True)
class Source:
    module: str
    """Dotted name as it is imported, or the path of a file that nobody imports."""
    path: str
    tree: ast.Module

    @classmethod
    def of(cls, text: str, module: str, path: str = "example.py") -> Source:
        return cls(module=module, path=path, tree=ast.parse(text))

    @property
    def room(self) -> str:
        """Room of `inflight` that it belongs to; the package's name for code outside."""
        return room_of(self.module) or self.module.split(".")[0]

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(imports_of(self.tree, self.module, is_package=self.path.endswith("__init__.py")))

    def imports_itself(self, *packages: str) -> Iterator[Import]:
        """Imports of any of `packages` (dotted names, too) or of a module in one."""
        return (each for each in self.imports if any(f"{each.module}.".startswith(f"{name}.") for name in packages))


def room_of(module: str) -> str:
    """The room of a module of `inflight`; "" for the package itself (see `the_door_is_light`) and any other module."""
    if module in ENTRANCES:
        return ENTRANCES[module]
    parts = module.split(".")
    if parts[0] != "inflight" or module == "inflight":
        return ""
    return parts[1] if len(parts) > 1 and parts[1] in (*TOP, *STAIRS, *BESIDE) else GROUND


def one_way(source: Source) -> Iterator[str]:
    room = room_of(source.module)
    for each in source.imports:
        target = room_of(each.module)
        if room and target and not _may_import(room, target):
            yield f"{source.path}:{each.line}: {room} imports {each.module}"
        if room and room not in KERNEL_USERS and each.module.split(".")[0] == "inflight_kernels":
            yield f"{source.path}:{each.line}: {room} imports {each.module}"


def _may_import(room: str, target: str) -> bool:
    if target in (GROUND, room):
        return True
    if target in BESIDE:
        return room in BESIDE[target]
    if target not in STAIRS:
        return False
    return room in TOP or (room in STAIRS and STAIRS.index(target) > STAIRS.index(room))


def ends_meet_in_the_wire(source: Source) -> Iterator[str]:
    end = _executor_room(source.module)
    for each in source.imports:
        target = _executor_room(each.module)
        if (end in WIRE_ENDS and target in WIRE_ENDS - {end}) or (end == "wire" and target in WIRE_ENDS):
            yield f"{source.path}:{each.line}: {end} imports {each.module}"


def dialects_stand_apart(source: Source) -> Iterator[str]:
    """None knows another, and of the server only its roof knows any."""
    own = _dialect(source.module)
    in_server = source.module.startswith("inflight.http.") and source.module not in ROOF
    for each in source.imports:
        target = _dialect(each.origin)
        if in_server and target and target != own:
            yield f"{source.path}:{each.line}: {source.module} imports {each.module}"


def _dialect(module: str) -> str:
    parts = module.split(".")
    return parts[3] if parts[:3] == ["inflight", "http", "dialects"] and parts[3:4] and parts[3] in DIALECTS else ""


def _executor_room(module: str) -> str:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["inflight", "executor"] and len(parts) > 2 else ""


def ranks_know_no_text(source: Source) -> Iterator[str]:
    """Only those who ask an engine turn text into tokens; `front` and the modules beside it are what they import."""
    end = _executor_room(source.module)
    if end in ("launchers", "rank", "wire"):
        for each in source.imports_itself("inflight.text", "tokenizers"):
            yield f"{source.path}:{each.line}: {end} imports {each.module}"


def the_door_is_light(source: Source) -> Iterator[str]:
    """The package offers names of its rooms to programs, and every module of it is imported through it: so it loads
    nothing before a name is used, and no room goes through it to reach another."""
    if source.module == "inflight":
        for each in source.imports:
            if each.at_import_time and each.module.split(".")[0] not in sys.stdlib_module_names:
                yield f"{source.path}:{each.line}: inflight imports {each.module} when it is imported"
    elif source.room != "ci":
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module == "inflight" and not node.level:
                for name in {alias.name for alias in node.names} & PUBLIC_NAMES:
                    yield f"{source.path}:{node.lineno}: imports {name} from inflight instead of its module"


def no_torch_in_the_batch_manager(source: Source) -> Iterator[str]:
    if source.room in ("batch_manager", GROUND):
        for each in source.imports_itself("torch", "inflight_kernels"):
            yield f"{source.path}:{each.line}: {source.room} imports {each.module}"


def kernels_know_nobody(source: Source) -> Iterator[str]:
    if source.room == "inflight_kernels":
        for each in source.imports_itself("inflight", "inflight_client"):
            yield f"{source.path}:{each.line}: a kernel imports {each.module}"
        if not {"gpu", "common"} & set(source.module.split(".")):
            for each in source.imports_itself("triton", "inflight_kernels.common"):
                yield f"{source.path}:{each.line}: {each.module} is imported outside gpu"


def client_stands_alone(source: Source) -> Iterator[str]:
    """The commands that run the engine alone may reach it, and only when they run."""
    if source.room == "inflight_client" or source.path.startswith("client/examples/"):
        for each in source.imports_itself("inflight", "inflight_kernels"):
            if each.at_import_time or source.module not in ENGINE_COMMANDS:
                yield f"{source.path}:{each.line}: the client imports {each.module}"
    elif source.room != "ci":
        for each in source.imports_itself("inflight_client"):
            yield f"{source.path}:{each.line}: {source.room} imports {each.module}"


def no_folder_is_a_package(source: Source) -> Iterator[str]:
    """A package called `kernels` exists elsewhere, and transformers imports it."""
    for each in source.imports_itself("kernels", "backend", "client"):
        yield f"{source.path}:{each.line}: imports {each.module}"


def model_py_is_light(source: Source) -> Iterator[str]:
    """tritonserver imports it more than once, before it knows whether it will use it."""
    if source.module == "model":
        for each in source.imports:
            if each.at_import_time and each.module.split(".")[0] not in (
                *sys.stdlib_module_names,
                "triton_python_backend_utils",
            ):
                yield f"{source.path}:{each.line}: model.py imports {each.module} when it is imported"


def nothing_is_unpickled(source: Source) -> Iterator[str]:
    for each in source.imports_itself(*PICKLERS):
        yield f"{source.path}:{each.line}: imports {each.module}"
    for call in _calls(source.tree):
        name = _called(call)
        if name in ("torch.load", "torch.hub.load") or name.rpartition(".")[2] in OBJECT_CALLS:
            yield f"{source.path}:{call.lineno}: calls {name}"
        if _is_on(call, "allow_pickle") or _is_on(call, "trust_remote_code"):
            yield f"{source.path}:{call.lineno}: {name} is told to trust what it reads"
    for each in source.imports:
        if each.module == "torch.load":
            yield f"{source.path}:{each.line}: imports torch.load"


def mpi_moves_buffers(source: Source) -> Iterator[str]:
    if any(True for _ in source.imports_itself("mpi4py")):
        for call in _calls(source.tree):
            if isinstance(call.func, ast.Attribute) and call.func.attr in MPI_PICKLES:
                yield f"{source.path}:{call.lineno}: calls {_called(call)}"


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _is_on(call: ast.Call, keyword: str) -> bool:
    """Whether a keyword argument is given as anything but a plain False."""
    return any(
        each.arg == keyword and not (isinstance(each.value, ast.Constant) and each.value.value is False)
        for each in call.keywords
    )


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (
    one_way,
    ends_meet_in_the_wire,
    dialects_stand_apart,
    ranks_know_no_text,
    the_door_is_light,
    no_torch_in_the_batch_manager,
    kernels_know_nobody,
    client_stands_alone,
    no_folder_is_a_package,
    model_py_is_light,
    nothing_is_unpickled,
    mpi_moves_buffers,
)


@cache
def sources() -> tuple[Source, ...]:
    return tuple(
        Source.of(path.read_text("utf-8"), module_of(path.relative_to(ROOT)), str(path.relative_to(ROOT)))
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    )


def test_every_room_is_known() -> None:
    rooms = {path.parent.name for path in (ROOT / "backend" / "inflight").glob("*/*.py")}
    assert rooms == {*TOP, *STAIRS, *BESIDE}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    assert [breach for source in sources() for breach in rule(source)] == []


@pytest.mark.parametrize(
    ("rule", "module", "text"),
    [
        (one_way, "inflight.executor.x", "from inflight.server.reply import Reply"),
        (one_way, "inflight.executor.x", "def f():\n    import inflight.server.reply"),
        (one_way, "inflight.layers.x", "from ..models import decoder"),
        (one_way, "inflight.batch_manager.x", "from inflight.distributed.mpi import MpiRankGroup"),
        (one_way, "inflight.distributed.x", "from inflight.runtime.device import choose_device"),
        (one_way, "inflight.server.x", "from inflight.supervisor import processes"),
        (one_way, "inflight.http.x", "from inflight.server.reply import Reply"),
        (one_way, "inflight.server.x", "from inflight.http.choice import Choice"),
        (one_way, "inflight.supervisor.x", "from inflight import server"),
        (one_way, "inflight.request", "from inflight.layers.mlp import GatedMLP"),
        (one_way, "inflight.executor.x", "import inflight_kernels"),
        (ends_meet_in_the_wire, "inflight.executor.front.x", "from inflight.executor.launchers.mpi import Mpi"),
        (ends_meet_in_the_wire, "inflight.executor.wire.x", "def f():\n    import inflight.executor.rank.worker"),
        (dialects_stand_apart, "inflight.http.guard", "from inflight.http.dialects.openai.errors import TYPES"),
        (dialects_stand_apart, "inflight.http.dialects.ollama.x", "from inflight.http.dialects.openai import fields"),
        (one_way, "inflight.text.x", "from inflight.server.reply import Reply"),
        (one_way, "inflight.batch_manager.x", "from inflight.text.tokenizer import Tokenizer"),
        (ranks_know_no_text, "inflight.executor.rank.x", "from inflight.text.tokenizer import Tokenizer"),
        (the_door_is_light, "inflight", "from inflight.config import EngineConfig"),
        (the_door_is_light, "inflight.batch_manager.x", "from inflight import Executor"),
        (no_torch_in_the_batch_manager, "inflight.batch_manager.x", "from torch import Tensor"),
        (no_torch_in_the_batch_manager, "inflight.stats", "import torch"),
        (kernels_know_nobody, "inflight_kernels.norm.gpu.x", "from inflight.request import Request"),
        (kernels_know_nobody, "inflight_kernels.norm.reference", "import triton.language as tl"),
        (kernels_know_nobody, "inflight_kernels.norm", "from inflight_kernels.common import checks"),
        (client_stands_alone, "inflight_client.engine_commands", "from inflight.config import EngineConfig"),
        (client_stands_alone, "inflight_client.chat", "def f():\n    import inflight.config"),
        (client_stands_alone, "inflight.server.x", "import inflight_client"),
        (no_folder_is_a_package, "ci.unit.x", "from kernels import rms_norm"),
        (model_py_is_light, "model", "import numpy as np"),
        (nothing_is_unpickled, "inflight.x", "import pickle"),
        (nothing_is_unpickled, "inflight.x", "import torch\ntorch.load('weights.pt')"),
        (nothing_is_unpickled, "inflight.x", "AutoConfig.from_pretrained(path, trust_remote_code=True)"),
        (nothing_is_unpickled, "inflight.x", "AutoConfig.from_pretrained(path, trust_remote_code=wanted)"),
        (nothing_is_unpickled, "inflight.x", "socket.recv_pyobj()"),
        (mpi_moves_buffers, "inflight.x", "from mpi4py import MPI\nMPI.COMM_WORLD.bcast(x)"),
    ],
)
def test_a_breach_is_seen(rule: Callable[[Source], Iterator[str]], module: str, text: str) -> None:
    assert list(rule(Source.of(text, module)))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("inflight.server.x", "from inflight.executor.executor import Executor"),
        ("inflight.executor.x", "from inflight.distributed.rank_group import RankGroup"),
        ("inflight.executor.front.x", "from inflight.executor.wire.launch import Launch"),
        ("inflight.models.x", "import inflight_kernels\nfrom inflight.config import EngineConfig"),
        (
            "inflight",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from inflight.config import EngineConfig",
        ),
        ("inflight.x", "from inflight import config"),
        ("inflight.executor.front.x", "from inflight.text.detokenizer import Detokenizer"),
        ("inflight.worker", "from inflight.executor.rank.worker import main"),
        ("inflight.x", "from mpi4py import MPI\nMPI.COMM_WORLD.Bcast(x)"),
        ("inflight.x", "AutoConfig.from_pretrained(path, trust_remote_code=False)"),
        ("inflight_client.engine_commands", "def serve():\n    from inflight.supervisor.serve import serve"),
        ("model", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import inflight.server.start"),
    ],
)
def test_what_is_allowed_is_no_breach(module: str, text: str) -> None:
    assert [breach for rule in RULES for breach in rule(Source.of(text, module))] == []


def test_no_file_can_be_taken_for_the_language_or_the_server() -> None:
    assert [path for folder in FOLDERS for path in (ROOT / folder).rglob("triton_*")] == []


@pytest.mark.parametrize(
    ("rooms", "heavy"),
    [
        # What `inflight serve` and `inflight --help` load.
        (
            ("inflight.supervisor",),
            "torch transformers numpy triton zmq mpi4py tokenizers tritonclient inflight_kernels",
        ),
        # What every rank's loop loads: it runs with fake runners on machines without torch.
        (("inflight.batch_manager",), "torch transformers triton zmq mpi4py inflight_kernels"),
        # What tritonserver's stub loads: the ranks compute elsewhere.
        (
            ("inflight.server", "inflight.executor", "inflight.text"),
            "torch transformers triton mpi4py inflight_kernels jinja2",
        ),
        (("inflight.http",), "torch transformers triton mpi4py inflight_kernels tritonclient"),
    ],
    ids=["supervisor", "batch_manager", "stub", "http"],
)
def test_light_rooms_load_nothing_heavy(rooms: tuple[str, ...], heavy: str) -> None:
    modules = [source.module for source in sources() if source.module.startswith(tuple(f"{room}." for room in rooms))]
    assert modules
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*[name for name in {heavy.split()!r} if name in sys.modules])"
    )
    paths = [str(ROOT / folder) for folder in PACKAGES.values()]
    program = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
