"""Runs the test files that depend on what changed since a base: `make test-changed`.

What changed is what the commits since the branch left the base changed, what is not committed, and new files that git
does not ignore. On what a test file depends is read from the code (`ci/helpers/closures.py`). This is for daily work:
what passes here has still to pass `make test`.

    python -m ci.changed_tests                        what changed since main
    python -m ci.changed_tests --base HEAD~3 -- -x    since another commit; what follows `--` is for pytest
    python -m ci.changed_tests --dry                  only say which files would run
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from closures import ROOT, Tree

RUNS = (("ci/unit/", "2"), ("ci/kernels/", "auto"), ("ci/L0_", "4"))
"""Folders whose tests share a run, because triton is interpreted in some only; and how many of their files at once."""
NO_TESTS = 5
"""Exit status of pytest where its options left no test."""


def changed_since(base: str) -> set[str]:
    """Paths, also of files that are gone."""
    fork = git("merge-base", base, "HEAD").strip()
    tracked = git("diff", "--name-only", "--no-renames", "-z", fork)
    untracked = git("ls-files", "--others", "--exclude-standard", "-z")
    return {path for path in (tracked + untracked).split("\0") if path}


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def depending(tree: Tree, changed: set[str]) -> dict[str, set[str]]:
    """Test file -> what changed of its closure, for those of which anything did."""
    found = {test: set(tree.closure(test).files & changed) for test in tree.tests()}
    return {test: files for test, files in found.items() if files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="commit or branch with which to compare (default: main)")
    parser.add_argument("--dry", action="store_true", help="only say which files would run, and for what")
    parser.add_argument("options", nargs="*", help="after --: options of pytest")
    arguments = parser.parse_args()
    changed = changed_since(arguments.base)
    tree = Tree(gone={path for path in changed if not (ROOT / path).exists()})
    found = {test: files for test, files in depending(tree, changed).items() if (ROOT / test).exists()}
    for test, files in found.items() if arguments.dry else ():
        shown = ", ".join(sorted(files)[:3])
        print(f"{test}: {shown}{f' and {len(files) - 3} more' if len(files) > 3 else ''}")
    rest = Counter(os.path.dirname(test) for test in tree.tests() if test not in found)
    print(
        f"{len(found)} of {len(found) + rest.total()} test files depend on the {len(changed)} files that differ from "
        f"{arguments.base}; the other {rest.total()} import, read and start none of these"
    )
    failed = 0
    for folder, workers in RUNS if not arguments.dry else ():
        chosen = [test for test in found if test.startswith(folder)]
        if chosen:
            command = [sys.executable, "-m", "pytest", *chosen, "--dist", "loadfile", "--no-loadscope-reorder"]
            command += ["--numprocesses", workers, *arguments.options]
            status = subprocess.run(
                command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
            ).returncode
            failed = failed or (status if status != NO_TESTS else 0)
    return failed


if __name__ == "__main__":
    sys.exit(main())
