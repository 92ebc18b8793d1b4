"""`tm-slurm plan`: how many standbys a job should have."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tm_slurm.cli.failures import UserMistake

if TYPE_CHECKING:
    from tm_slurm.planning.sizing import Plan

BENCH = Path("build/bench/downtime.json")
MOST = 4096


class _Positive(click.FloatRange):
    def __init__(self, *, zero: bool = False) -> None:
        super().__init__(min=0.0, min_open=not zero)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no number of anything.", param, ctx)
        return number


SECONDS = _Positive(zero=True)


@click.command()
@click.option(
    "--gpus", required=True, type=click.IntRange(1, 1 << 26), help="GPUs that train (the world size)."
)
@click.option("--gpus-per-node", default=8, show_default=True, type=click.IntRange(1, 1024))
@click.option("--mttf", type=_Positive(), metavar="HOURS", help="Between two failures of the job.")
@click.option(
    "--sacct-days", type=click.IntRange(1, 3660), metavar="N", help="Measure MTTF: sacct, the last N days."
)
@click.option(
    "--sacct-file",
    type=click.Path(path_type=Path),
    help="Measure MTTF: a file of `sacct -aXDnP -o JobIDRaw,State,NNodes,ElapsedRaw`.",
)
@click.option("--job", help="Measure MTTF and downtimes: a job's timeline (id, name, directory).")
@click.option(
    "--planned", type=_Positive(zero=True), default=1.0, show_default=True, help="Planned events a day."
)
@click.option("--downtime", type=SECONDS, metavar="S", help="Of a failure, a standby being free.")
@click.option(
    "--no-standby", type=SECONDS, metavar="S", help="Of a failure, none being free; default: as --restart."
)
@click.option("--planned-downtime", type=SECONDS, metavar="S", help="Of a planned move.")
@click.option("--restart", type=SECONDS, metavar="S", help="Of a restart from a checkpoint.")
@click.option(
    "--bench",
    type=click.Path(path_type=Path),
    help=f"Result of `make bench-downtime`; default: {BENCH}, if there. `--bench /dev/null`: none.",
)
@click.option(
    "--checkpoint-interval", type=_Positive(), metavar="S", help="Of restarts; default: Young's optimum."
)
@click.option("--checkpoint-cost", type=_Positive(zero=True), default=10.0, show_default=True, metavar="S")
@click.option(
    "--repair",
    type=_Positive(),
    default=4.0,
    show_default=True,
    metavar="HOURS",
    help="Until a used standby is replaced.",
)
@click.option(
    "--price", type=_Positive(zero=True), default=2.0, show_default=True, help="Of a GPU for an hour."
)
@click.option("--most", type=click.IntRange(0, MOST), metavar="K", help="Show 0 to K standbys.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw it (extra: report).")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def plan(*, as_json: bool, png: Path | None, most: int | None, **given: Any) -> None:
    """How many standbys? Expected ETTR, GPU hours wasted a week and their cost, for 0 to k of them.

    \b
    tm-slurm plan --gpus 16384
    tm-slurm plan --gpus 1024 --mttf 7.9 --price 2.5 --json
    tm-slurm plan --gpus 4096 --sacct-days 90

    What is not given is measured where there is something to measure by, or assumed: the last lines say
    which.
    """
    from tm_slurm.planning.inputs import ImpossibleInput

    try:
        found, sources, order = _plan(most, given)
    except ImpossibleInput as error:
        raise UserMistake(str(error)) from None
    if png is not None:
        from tm_slurm.cli.plan_picture import draw

        draw(found, png)
    if as_json:
        click.echo(json.dumps(_as_json(found, sources), indent=1))
        return
    from tm_slurm.cli.plan_text import show

    show(found, [(name, sources[name]) for name in order])


def _plan(most: int | None, given: dict[str, Any]) -> tuple[Plan, dict[str, str], list[str]]:
    from tm_slurm.cli.plan_sources import Sources
    from tm_slurm.planning.inputs import Inputs
    from tm_slurm.planning.sizing import plan as plan_of

    sources = Sources(given)
    nodes = max(1, given["gpus"] // given["gpus_per_node"])
    mttf_by_nodes: Callable[[int], float] = sources.mttf(nodes)
    mttf_h = mttf_by_nodes(nodes)
    restart_s = sources.restart()
    downtime_s = sources.downtime()
    inputs = Inputs(
        gpus=given["gpus"],
        gpus_per_node=given["gpus_per_node"],
        mttf_h=mttf_h,
        planned_per_day=sources.said("planned", "planned_per_day", 1.0),
        downtime_s=downtime_s,
        no_standby_s=sources.no_standby(restart_s, downtime_s),
        planned_s=sources.planned_downtime(),
        restart_s=restart_s,
        checkpoint_interval_s=sources.interval(mttf_h),
        checkpoint_cost_s=sources.said("checkpoint_cost", "checkpoint_cost_s", 10.0),
        repair_h=sources.said("repair", "repair_h", 4.0),
        price=sources.said("price", "price", 2.0),
    )
    return plan_of(inputs, mttf_by_nodes, most=most), sources.named, list(sources.named)


def _as_json(found: Plan, sources: dict[str, str]) -> dict[str, Any]:
    def strategy(one: Any) -> dict[str, Any]:
        return {**asdict(one), "wasted_gpu_h": one.wasted_gpu_h}

    return {
        "inputs": asdict(found.inputs),
        "sources": sources,
        "restart": strategy(found.restart),
        "standbys": [strategy(one) for one in found.standbys],
        "best": strategy(found.best),
        "break_even_gpus": found.break_even_gpus,
        "break_even_restart_gpus": found.break_even_restart_gpus,
    }
