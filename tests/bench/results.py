"""The JSON of a benchmark that is measured in parts: written after each, so that one that fails costs no
other, and with when and of which sources each was made."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from figures_record import stamp

Parts = dict[str, Any]


class Result:
    """`name`: of build/bench/NAME.json, whose parts of earlier runs are kept. `figures`: what the parts come
    to, with whatever else the JSON is to have beside its figures. `about`: the same for all parts."""

    def __init__(
        self,
        name: str,
        figures: Callable[[Parts], tuple[dict[str, Any], dict[str, Any]]],
        *,
        root: Path | None = None,
        **about: Any,
    ) -> None:
        folder = root or Path(__file__).parents[2] / "build" / "bench"
        self.path = folder / f"{name}.json"
        before = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.parts: Parts = before.get("parts", {})
        self._made: dict[str, Any] = before.get("made", {})
        self._figures = figures
        self._about = {
            "name": name,
            "machine": {
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
                "processor": platform.machine(),
            },
            "versions": {"torch": version("torch"), "python": platform.python_version()},
            **about,
        }

    @property
    def figures(self) -> dict[str, Any]:
        """Of all parts so far."""
        return self._figures(self.parts)[0]

    def measure(self, part: str, run: Callable[[], Any]) -> None:
        """Run one part and write it down."""
        begun = stamp()
        self.parts[part] = run()
        self._made[part] = begun
        figures, beside = self._figures(self.parts)
        whole = {**self._about, "made": self._made, "figures": figures, **beside, "parts": self.parts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(whole, indent=1) + "\n")
