"""Which of these tests have passed on which Slurm release, and with which sources: every run writes it down,
in build/suite/RELEASE.json, and adds to what earlier runs with the same sources have written.

    {"sources": SHA-256, "next": false,
     "tests": {"tests/slurm/test_x.py::test_y": {"passed": 2, "last": "passed"}}}
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from tm_slurm.localcluster.requirements import slurm_release

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "suite"
SOURCES = ("tm_slurm", "spank", "sbatch_templates", "tests/slurm")
BUILT = (".so", ".pyc")
NEXT = "TM_SLURM_NEXT"
"""Set where tests/next/next-release runs them."""

LOCK_S, COLLECT_S = 30.0, 120.0


def sources() -> str:
    """A digest of everything that these tests are about, and of themselves."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT)
            if path.is_file() and path.suffix not in BUILT and "__pycache__" not in name.parts:
                found.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def record(outcomes: Mapping[str, str], of: str) -> None:
    """Add what has come of some tests: name to passed, failed or skipped. `of`: the sources when they
    began."""
    release = slurm_release()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{release}.json"
    with FileLock(path.with_suffix(".lock"), timeout=LOCK_S):
        known = _read(path)
        tests: dict[str, Any] = known["tests"] if known.get("sources") == of else {}
        for name, outcome in outcomes.items():
            of_this = tests.setdefault(name, {})
            of_this[outcome] = of_this.get(outcome, 0) + 1
            of_this["last"] = outcome
        said = {"sources": of, "next": NEXT in os.environ, "tests": tests}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
        fresh.replace(path)


@dataclass(frozen=True)
class Passed:
    """What is known of a release. `missing`: tests that have not run with these sources, or did not pass when
    they ran last; `flaky`: those that have passed and failed."""

    release: str
    is_of_these_sources: bool
    tests: int
    missing: list[str]
    flaky: list[str]
    skipped: list[str]

    @property
    def whole(self) -> bool:
        return self.is_of_these_sources and not self.missing


def releases() -> list[Passed]:
    """What the records say, one release after another."""
    now = sources()
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        known = _read(path)
        tests, names = known["tests"], _collected(known["next"])
        said = {name: tests.get(name, {}).get("last", "not run") for name in names}
        found.append(
            Passed(
                release=path.stem,
                is_of_these_sources=known["sources"] == now,
                tests=len(names),
                missing=[
                    f"{name}: {last}" for name, last in said.items() if last not in ("passed", "skipped")
                ],
                flaky=[name for name in names if {"passed", "failed"} <= tests.get(name, {}).keys()],
                skipped=[name for name, last in said.items() if last == "skipped"],
            )
        )
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def _collected(is_next: bool) -> list[str]:
    """The names of all tests of the suite, as pytest has them."""
    environment = {name: value for name, value in os.environ.items() if name != NEXT}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/slurm"],
        cwd=ROOT,
        env=environment | ({NEXT: "1"} if is_next else {}),
        capture_output=True,
        text=True,
        timeout=COLLECT_S,
        check=False,
    )
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if not names:
        raise RuntimeError(
            f"pytest collects no tests in tests/slurm: {done.stdout[-500:]}{done.stderr[-500:]}"
        )
    return names
