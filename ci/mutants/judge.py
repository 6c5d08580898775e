"""Whether any test catches a fault, and which one first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ci.mutants.choice import Stage, stages
from ci.mutants.faults import Fault, Module
from ci.mutants.reach import Records
from ci.mutants.trials import Trials

SLACK = 4.0
START_SECONDS = 60.0
"""A run of tests may take `SLACK` times what was recorded, and this besides."""
UNKNOWN_SECONDS = 400.0
"""For tests whose seconds were not recorded."""
CAUGHT, SURVIVED, GONE = "caught", "survived", "gone"


@dataclass(frozen=True)
class Finding:
    """What became of a fault."""

    result: str
    """`caught`; `survived`; `gone`: its place is no longer in the source."""
    by: str = ""
    """The test that failed, or the one that ran when the process crashed or its time was over."""
    when: str = ""
    """`call`, `setup`, `teardown`, `collection`, `crash` or `time limit`."""
    stage: str = ""
    """Which tests were asked last."""
    tests: int = 0
    """How many were run."""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_by_test(self) -> bool:
        return self.result == CAUGHT and "::" in self.by

    def __str__(self) -> str:
        if self.result == GONE:
            return "its place is no longer there"
        if self.result == SURVIVED:
            return f"SURVIVED {self.tests} tests" if self.tests else "SURVIVED: no test that was asked reaches it"
        return f"caught ({self.stage}, {self.when}) by {self.by}"


class Judge:
    """Plants faults and asks tests, stage by stage."""

    def __init__(
        self,
        root: Path,
        sources: dict[str, Module],
        trials: Trials,
        records: Records,
        unreliable: set[str],
        *,
        servers: bool,
    ) -> None:
        """`unreliable`: tests that are not asked, which `failing_anyway` adds to."""
        self._root = root
        self._sources = sources
        self._trials = trials
        self._records = records
        self._servers = servers
        self._unreliable = unreliable

    def judge(self, fault: Fault, expected: Finding | None) -> Finding:
        """`expected`: what was found in another state of the tree, whose test is asked first."""
        module = self._sources.get(fault.path)
        if module is None or fault.key not in module.places:
            return Finding(GONE)
        seconds, tests, last = 0.0, 0, ""
        with self._trials.planted(fault.path, module.planted(fault.key)):
            for stage in self._stages(fault, module, expected):
                wanted = [test for test in stage.tests if test not in self._unreliable]
                files = [file for file in stage.files if (self._root / file).exists()]
                if not files or (stage.tests and not wanted):
                    continue
                limit = START_SECONDS + (SLACK * stage.seconds or UNKNOWN_SECONDS)
                verdict = self._trials.run(wanted, files, limit, interpreted=stage.interpreted)
                seconds, tests, last = seconds + verdict.seconds, tests + verdict.tests, stage.name
                if verdict.failed is not None:
                    return Finding(CAUGHT, verdict.failed, verdict.when, last, tests, round(seconds, 1))
        return Finding(SURVIVED, stage=last, tests=tests, seconds=round(seconds, 1))

    def _stages(self, fault: Fault, module: Module, expected: Finding | None) -> Iterator[Stage]:
        if expected is not None and expected.is_by_test:
            test = found_again(expected.by, self._root)
            files = [test.partition("::")[0]]
            yield Stage("as before", [test], files, 0.0, interpreted=_is_interpreted(test))
            # Some faults read memory that is not theirs, or run in threads: another test of the file may notice.
            yield Stage("its file", [], files, 0.0, interpreted=_is_interpreted(test))
        fast, slow = self._records.fast, self._records.slow
        yield from stages(fault.path, module.places[fault.key], fast, slow, self._root, servers=self._servers)

    def failing_anyway(self, tests: Iterable[str]) -> list[str]:
        """Those of `tests` that fail in the private tree without a fault; they are not asked again."""
        found = []
        for interpreted in (False, True):
            left = sorted(test for test in set(tests) - self._unreliable if _is_interpreted(test) == interpreted)
            while left:
                files = list(dict.fromkeys(test.partition("::")[0] for test in left))
                verdict = self._trials.run(left, files, UNKNOWN_SECONDS + 60 * len(files), interpreted=interpreted)
                if verdict.failed is None:
                    break
                failed = verdict.failed if verdict.failed in left else left[0]
                found.append(failed)
                left.remove(failed)
        self._unreliable.update(found)
        return found


def _is_interpreted(test: str) -> bool:
    return test.startswith("ci/kernels/")


def found_again(test: str, root: Path) -> str:
    """The id of a recorded test below `root`: if its function is no longer in its file, that of one of its name."""
    file, _, name = test.partition("::")
    function = f"def {name.partition('[')[0].rpartition('::')[2]}("
    if not (root / file).is_file() or function not in (root / file).read_text(encoding="utf-8"):
        for path in sorted((root / "ci").rglob("test_*.py")):
            if function in path.read_text(encoding="utf-8"):
                return f"{path.relative_to(root)}::{name}"
    return test
