"""What the demo prints is what happened."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tm_slurm.demo.show import Show


@pytest.mark.parametrize(
    ("seconds", "line"),
    [(0.0, "run step   10  loss 2.500\n"), (0.25, "run step   10  loss 2.500  0.250 s\n")],
)
def test_a_step_without_a_time_shows_none(seconds: float, line: str) -> None:
    output = io.StringIO()
    show = Show(Console(file=output, soft_wrap=True), "run")
    show.entry({"what": "step", "step": 10, "loss": 2.5, "seconds": seconds})
    assert output.getvalue() == line
