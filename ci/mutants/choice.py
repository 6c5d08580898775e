"""Which tests could catch a fault: those that execute its line, those beside its module first, cheap ones first.

Knows what was recorded (`reach.py`), and runs nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ci.mutants.faults import Place
from ci.mutants.reach import Reach

NEAR_SECONDS = 12.0
"""Of tests, as they were recorded, that are run first; and what importing each of their files is taken for."""
FILE_SECONDS = 0.4
MORE_SECONDS = 200.0
MAX_USERS = 4
"""Operations that are asked for what they share."""
SERVERS = {
    "server": ("L0_backend", "L0_dialects"),
    "executor": ("L0_executor",),
    "openai": ("L0_openai",),
    "supervisor": ("L0_supervisor",),
    "inflight_client": ("L0_client",),
}
"""Room → its folders of tests against real servers; of all others `L0_llm`."""


@dataclass(frozen=True)
class Stage:
    """Tests that are run together, in this order."""

    name: str
    tests: list[str]
    files: list[str]
    seconds: float
    """That they took when they were recorded; 0 if they were not."""
    interpreted: bool = False


def stages(path: str, place: Place, fast: Reach, slow: Reach | None, root: Path, *, servers: bool) -> Iterator[Stage]:
    """In the order in which they are tried. The fast tests come in two: the nearest and cheapest, and all others."""
    tests = fast.tests_of(path, place)
    near, others = _cut(path, tests, fast, NEAR_SECONDS)
    if near:
        yield _stage("near", path, near, fast)
    kernels = list(_kernel_tests(path, root))
    if kernels:
        yield Stage("kernels", [], kernels, 0.0, interpreted=True)
    more, _ = _cut(path, others, fast, MORE_SECONDS)
    if more:
        yield _stage("fast", path, more, fast)
    if slow is not None:
        chosen, _ = _cut(path, slow.tests_of(path, place), slow, MORE_SECONDS)
        if chosen:
            yield _stage("slow", path, chosen, slow)
    if servers:
        room = next((part for part in path.split("/") if part in SERVERS), "")
        yield Stage("servers", [], [f"ci/{folder}" for folder in SERVERS.get(room, ("L0_llm",))], 0.0)


def _kernel_tests(path: str, root: Path) -> Iterator[str]:
    """Of a kernel for GPUs: its family's, those of the same name first; of what families share: of those that import
    it."""
    match = re.fullmatch(r"kernels/inflight_kernels/(\w+)/(?:gpu/)?(\w+)\.py", path)
    if match is None or match[1] == "cpu":
        return
    family, stem = match.groups()
    checks = root / "ci" / "kernels"
    if (checks / family).is_dir():
        files = sorted(checks.glob(f"{family}/test_*.py"), key=lambda file: (file.stem != f"test_{stem}", file.stem))
    else:
        users = (root / "kernels" / "inflight_kernels").glob("*/gpu/[!_]*.py")
        using = {user.stem for user in users if re.search(rf"\b{stem} import", user.read_text(encoding="utf-8"))}
        files = [file for file in sorted(checks.glob("*/test_*.py")) if file.stem.removeprefix("test_") in using]
        files = [*checks.glob(f"test_{stem}.py"), *files[:MAX_USERS]]
    yield from (str(file.relative_to(root)) for file in files)


def _stage(name: str, path: str, tests: list[str], reach: Reach) -> Stage:
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    return Stage(name, tests, files, sum(reach.seconds.get(test, 0.0) for test in tests))


def _cut(path: str, tests: set[str] | list[str], reach: Reach, seconds: float) -> tuple[list[str], list[str]]:
    """The nearest of `tests` that take `seconds` in all, and the others. A file's tests stay together, cheap first."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: (reach.seconds.get(test, 0.0), test)):
        by_file[test.partition("::")[0]].append(test)
    taken: list[str] = []
    others: list[str] = []
    left = seconds
    costs = {file: sum(reach.seconds.get(test, 0.0) for test in each) for file, each in by_file.items()}
    for file in sorted(by_file, key=lambda file: (-_nearness(path, file), costs[file], file)):
        left -= FILE_SECONDS
        for test in by_file[file]:
            cost = reach.seconds.get(test, 0.0)
            if taken and cost > left:
                others.append(test)
            else:
                taken.append(test)
                left -= cost
    return taken, others


def _nearness(path: str, test_file: str) -> int:
    """How many folders and words of names a source and a file of tests share; those of the source's own name count
    twice."""
    *folders, name = path.removesuffix(".py").split("/")
    *test_folders, test_name = test_file.removesuffix(".py").removeprefix("ci/").split("/")
    words, test_words = set(name.strip("_").split("_")), set(test_name.removeprefix("test_").split("_"))
    shared_folders = set(folders) & set(test_folders)
    if "inflight_client" in folders and "client" in test_folders:
        shared_folders.add("client")
    return 2 * len(shared_folders) + 2 * len(words & test_words) + (words == test_words)
