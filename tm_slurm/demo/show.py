"""What the demo prints while it goes: the steps as they come, the drains, the phases of each move."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from tm_slurm.observe.spoken import in_words, of_downtime

STEP_EVERY = 10

SPOKEN = {
    "leads": "coordinator runs on {node}",
    "started": "training starts, {world_size} ranks on {nodes}",
    "warm": "standby {node} is warm",
    "event_drain": "[bold]{node} is being drained[/bold] ({reason})",
    "prepare": "  prepare: {pairs} (training goes on)",
    "prepared": "  prepared in {seconds:.2f} s",
    "switching": "  switch at step {step}",
    "moved": "  [green]moved[/green] {pairs}",
    "downtime": "  downtime {downtime} (a step takes {steady_step_s:.3f} s)",
    "released": "  {node} given back to Slurm",
    "drained": "  [green]{node} is {state}[/green] {after_notice_s:.1f} s after the drain was seen",
    "waiting": "[yellow]{node} should be left, but no standby is free[/yellow]",
    "cancelled": "[yellow]the move was given up: {reason}[/yellow]",
    "trained": "training is done at step {step}",
    "ended": "job {state}: {reason}",
}


class Show:
    """`label` begins every line, so that two runs can be told apart."""

    def __init__(self, console: Console, label: str) -> None:
        self._console = console
        self._label = label

    def entry(self, entry: dict[str, Any]) -> None:
        """One entry of the timeline, or one step."""
        if entry["what"] == "step":
            if entry["step"] % STEP_EVERY == 0:
                seconds = f"  {entry['seconds']:.3f} s" if entry["seconds"] else ""  # step 0 has no time
                self.line(f"step {entry['step']:4d}  loss {entry['loss']:.3f}{seconds}")
            return
        text = SPOKEN.get(entry["what"])
        if text is not None:
            self.line(text.format(**{**entry, **in_words(entry)}))

    def line(self, text: str) -> None:
        self._console.print(f"[dim]{self._label}[/dim] {text}", highlight=False)


def closing_table(result: dict[str, Any]) -> Table:
    """The outcome for people; `result` is what demo.json holds."""
    table = Table(
        title="two drains under a running job (floor: sending the state alone)", title_justify="left"
    )
    for column in ("node", "moved to", "downtime", "floor", "prepared in", "drain → DRAINED", "node is"):
        table.add_column(column)
    for move in result["moves"]:
        table.add_row(
            move["node"],
            move["joiner"],
            of_downtime(move["downtime_s"]),
            f"{move['floor_s']:.3f} s",
            f"{move['prepare_s']:.2f} s",
            f"{move['drain_to_released_s']:.2f} s",
            move["node_state"],
        )
    return table
