"""Writes the README's tables, from the records in tests/bench/figures.

    python tests/bench/readme_tables.py [--from build/bench]        (make tables)

Before that the records of all benchmarks are renewed of which there is a newer run in build/bench. A
benchmark without a record has no table.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from baselines import summary
from baselines.rival import DEATH, FAULTS, PLANNED, POWER_OFF, RANKS, UNPLUGGED
from figures_record import Record, kept_records, take

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- figures:begin -->\n", "<!-- figures:end -->\n"


WIDTH = 120
MEGABYTE = 1 << 20
WHAT = "the local cluster, `configs/char_gpt.yaml`"
TIMES = "\N{MULTIPLICATION SIGN}"
NOT_MEASURED = "**not measured**"
HOW = (
    "Medians, in brackets the least and the most of n trials; each file of `tests/bench` says how it "
    "measures. `make tables` makes this from the runs."
)


@dataclass(frozen=True)
class Row:
    """A figure in words. `unit`: what follows it; "%": it is a fraction of one; "x": so many times. `least`:
    a bar is what it must reach, not what it must not exceed."""

    figure: str
    words: str
    unit: str = ""
    least: bool = False


TITLES = {
    "baselines": "Beside what people would use instead",
    "downtime": "What an interruption costs, from its instant on",
    "slurm": "Slurm",
    "overhead": "A training that nothing happens to",
    "ettr": "A training that is moved again and again, or has a slow node",
    "scale": "The coordinator of up to 16,384 simulated nodes",
    "warmup": "A standby's warm-up",
    "cli": "The command line",
    "profile": "Where the time goes",
}
ROWS: dict[str, Sequence[Row]] = {
    "downtime": (
        Row("process_death_s", "a rank is killed", "s"),
        Row("power_off_s", "its node is switched off", "s"),
        Row("unplugged_s", "its node is unplugged: silent", "s"),
        Row("frozen_s", "its node is frozen: silent", "s"),
        Row("leader_node_s", "the node with the coordinator is switched off", "s"),
        Row("process_death_s_by_ranks", "a rank is killed, by ranks in the job", "s"),
        Row("process_death_growth_with_ranks", "a killed rank, by ranks: the worst ÷ the first", "x"),
        Row("process_death_s_by_bytes", "a rank is killed, by the state of a rank", "s"),
        Row("planned_s_by_ranks", "a planned move, by ranks in the job", "s"),
        Row("planned_growth_with_ranks", "a planned move, by ranks: the worst ÷ the first", "x"),
        Row("process_death_s_by_leavers", "by ranks that are killed at once", "s"),
        Row("process_death_growth_with_leavers", "ranks killed at once: the worst ÷ the first", "x"),
        Row("planned_s_by_leavers", "a planned move, by nodes that leave at once", "s"),
        Row("planned_growth_with_leavers", "a planned move, by leavers: the worst ÷ the first", "x"),
        Row("planned_s_by_leavers_on_slow_links", "the same over slow links", "s"),
        Row("planned_growth_with_leavers_on_slow_links", "over slow links: the worst ÷ the first", "x"),
        Row("planned_s_by_bytes", "by the state of a rank", "s"),
        Row("planned_over_limit", "by state: the worst ÷ (50 ms + 1.3 times sending it by raw sockets)", "x"),
        Row("planned_ratio_floor_1gb", "1 GB a rank ÷ sending it by raw sockets", "x"),
        Row("planned_s_by_gb_s", "by the bandwidth of a link in GB/s", "s"),
        Row("planned_shaped_over_limit", "by bandwidth: the worst ÷ the same limit", "x"),
        Row("planned_s_by_groups", "by process groups", "s"),
        Row("state_256mb_ratio_floor", "256 MB of state to a joiner ÷ by raw sockets", "x"),
        Row("state_1gb_ratio_floor", "1 GB of it", "x"),
        Row("snapshot_overhead", "what snapshots cost a training", "%"),
    ),
    "slurm": (
        Row("drain_known_s", "a drain, until the coordinator knows", "s"),
        Row("drain_released_s", "until the node is DRAINED", "s"),
        Row("refill_s", "until another node is warm in its place", "s"),
        Row("spank_event_ms_median", "a task's death, until the coordinator has journalled it", "ms"),
        Row("frozen_coordinator_delay_ms", "how much longer a step starts with a frozen coordinator", "ms"),
        Row("flood_facts_lost", "facts lost of 1,000 events a second"),
        Row("slurm_releases", "releases on which all of `tests/slurm` has passed"),
    ),
    "overhead": (
        Row("throughput_over_ddp_tm", "throughput ÷ DDP on the same backend alone", "x", least=True),
        Row("throughput_over_ddp_gloo", "throughput ÷ DDP on gloo", "x", least=True),
        Row("device_throughput_over_ddp_tm", "÷ DDP on the same backend, where steps wait for a device", "x"),
        Row("agent_cpu_s_a_minute", "an agent's processor time a minute", "s"),
        Row("coordinator_and_agent_cpu_s_a_minute", "that of the agent that leads", "s"),
    ),
    "ettr": (
        Row("ettr_600s", "ETTR with a move every 600 s (a step stands for 6 s)", least=True),
        Row("straggler_loss", "lost of 100 steps to a node 25 % slower, which is left", "%"),
        Row("straggler_loss_without_eviction", "the same if it is kept", "%"),
        Row("false_evictions", "nodes left without a reason in 1,000 steps of four times the batch"),
        Row("false_evictions_short_steps", "in 1,000 steps of 50 ms, as `char_gpt.yaml` has them"),
    ),
    "scale": (
        Row("move_ms_64", "a move in a job of 64 nodes, until all is acknowledged", "ms"),
        Row("move_ms_16384", "the same in one of 16,384", "ms"),
        Row("rack_of_64_s", "a rack of 64 of them drained at once, until all have moved", "s"),
        Row("longest_silence_s", "the longest that an agent hears nothing meanwhile", "s"),
        Row("messages_16384_over_64", "messages for one leaver, 16,384 nodes ÷ 64", "x"),
        Row("coordinator_cores", "the coordinator's processors, heartbeats included"),
        Row("coordinator_rss_mb", "its memory", "MB"),
        Row("takeover_s", "until another one leads, its lease included", "s"),
        Row("takeover_after_a_day_s", "the same with the journal of a day", "s"),
        Row("ettr_64k_restart", "ETTR of a simulated month of 65,536 GPUs, restarts (a free node at once)"),
        Row("ettr_64k_48_standbys", "with 48 standbys"),
        Row("wasted_gpu_h_64k_restart", "GPU hours that were no training in it, restarts"),
        Row("wasted_gpu_h_64k_48_standbys", "with 48 standbys, their waiting included"),
    ),
    "warmup": (
        Row("first_step_ratio_max", "a joiner's first step ÷ a steady one, worst of all layouts", "x"),
        Row("promote_same_class_ms", "a standby ready for another rank of its class, worst", "ms"),
        Row("promote_other_class_ms", "of another class", "ms"),
        Row("recording_off_throughput_ratio", "throughput after recording ÷ before", "x", least=True),
    ),
    "cli": (
        Row("status_cpu_s", "`tm-slurm status`, processor time", "s"),
        Row("status_of_the_only_one_cpu_s", "the same without a job's name", "s"),
        Row("standbys_cpu_s", "`tm-slurm standbys`", "s"),
        Row("events_cpu_s", "`tm-slurm events`", "s"),
        Row("help_cpu_s", "`tm-slurm --help`", "s"),
        Row("submit_help_cpu_s", "the help of a command", "s"),
    ),
    "profile": (
        Row("step", "a steady step"),
        Row("native", "the same, in native libraries"),
        Row("switch", "the switch of a planned move"),
    ),
}
"""In this order. A figure that a run has not is left out, unless it has a bar; a bar without a row is an
error."""

RIVALS = {
    summary.OURS: "**tm_slurm**, one standby",
    "migration_delta_groups": "moves with delta groups alone",
    "migration_naive": "moves with neither (Migration Naive)",
    "torchrun": "torchrun, a checkpoint each step",
    "torchrun_10": "torchrun, each 10 steps",
    "requeue": "Slurm requeue, each step",
    "ft_launcher": "NVRx ft_launcher, each step",
    "nvrx_inprocess": "NVRx in-process, a warm reserve",
    "torchft_all": "torchft, all four required",
    "torchft_less": "torchft, going on with three",
}
FAULT_WORDS = {
    PLANNED: "node drained",
    DEATH: "rank killed",
    POWER_OFF: "node switched off",
    UNPLUGGED: "node unplugged",
}
UNPLANNED = (DEATH, POWER_OFF, UNPLUGGED)
RIVALS_NOTE = (
    "In brackets after a ratio: the least and the most of the pairs of trials, and what was asked for; of "
    "a node that is lost the same as of a rank that is killed. A silent peer is waited for for 0.5 s by "
    "ours (`policy.keepalive_s`; 2 s by default) and by torchft, for 1 s by NVRx in-process, and for 2 s "
    "by torchrun and ft_launcher. Fewer than {few} trials are in bold. A trial of ours that failed counts "
    "as endless, one of another not at all; and ours counts as no less than undisturbed steps differ. "
    "Here {cpus} processors are shared by {ranks} ranks: restarts, in which all of them import torch at "
    "once, take less where there are more."
)
BARRED = {
    "best_restart": None,
    "naive": "migration_naive",
    "nvrx_inprocess": "nvrx_inprocess",
    "torchft_all": "torchft_all",
    "torchft_less": "torchft_less",
}
"""What ends the name of a bar → the rival that it is about; None: the best of those that restart."""


def number(value: float, unit: str = "") -> str:
    """With three digits, or all that are before the point."""
    if unit == "%":
        value *= 100
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text + {"": "", "x": TIMES}.get(unit, f" {unit}")


def shown(value: Any, unit: str) -> str:
    """A figure; of one with a value for each size all of them; of a list its words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{sized(size)}: {number(each, unit)}" for size, each in value.items())
    if isinstance(value, Sequence):
        return ", ".join(map(str, value))
    return number(value, unit)


def sized(text: str) -> str:
    """A size as people write it: bytes in MB, all else as it is."""
    value = float(text)
    return f"{value / MEGABYTE:,.0f} MB" if value >= MEGABYTE else text


def asked_for(bar: float | None, unit: str, *, least: bool) -> str:
    return "" if bar is None else f"{'≥' if least else '≤'} {number(bar, unit)}"


def judged(value: float, bar: float, unit: str, *, least: bool) -> str:
    """The bar, and whether it is missed."""
    missed = value < bar if least else value > bar
    asked = asked_for(bar, unit, least=least)
    return f"**missed**: {asked}" if missed else asked


def range_of(spread: Mapping[str, Any], unit: str) -> str:
    """The least and the most of several trials; nothing for a single one."""
    if spread["n"] < 2:
        return ""
    low = number(spread["min"], unit).removesuffix(f" {unit}").removesuffix(TIMES)
    return f"{low} to {number(spread['max'], unit)}"


def rows_of(record: Record) -> Iterator[tuple[str, str, str]]:
    """What, how much, and what was asked for. ValueError for a bar that has no words."""
    rows = ROWS[record["name"]]
    figures, bars, spreads = record["figures"], record["bars"], record["spreads"]
    nameless = sorted(bars.keys() - {row.figure for row in rows})
    if nameless:
        raise ValueError(f"{record['name']}: expected a row in ROWS of readme_tables.py for {nameless}")
    for row in rows:
        value, bar = figures.get(row.figure), bars.get(row.figure)
        asked = asked_for(bar, row.unit, least=row.least)
        apart_s = told_apart_s(figures, row.figure)
        if value is None or value == []:
            if bar is not None:
                yield row.words, NOT_MEASURED, asked
            continue
        if apart_s is not None:
            yield row.words, f"not told apart: none over {number(apart_s, 's')}", asked
            continue
        cell = shown(value, row.unit)
        if row.figure in spreads and (least_to_most := range_of(spreads[row.figure], row.unit)):
            cell += f" ({least_to_most}, n = {spreads[row.figure]['n']})"
        if bar is not None:
            values = value.values() if isinstance(value, Mapping) else (value,)
            worst = min(values) if row.least else max(values)
            asked = judged(worst, bar, row.unit, least=row.least)
        yield row.words, cell, asked


def told_apart_s(figures: Mapping[str, Any], growth: str) -> float | None:
    """How long a downtime must be to be told apart from none; None where one that this growth is of is so."""
    apart_s = figures.get(f"{growth}_told_apart_s")
    if apart_s is None:
        return None
    largest = max(figures[growth.replace("_growth_with_", "_s_by_")].values())
    return float(apart_s) if largest < apart_s else None


def table_of_figures(record: Record) -> list[str]:
    lines = ["| what | measured | asked for |", "|---|---|---|"]
    return lines + [f"| {what} | {cell} | {asked} |" for what, cell, asked in rows_of(record)]


def table_of_rivals(record: Record) -> list[str]:
    """Seconds, and how many times ours, with what was asked of that."""
    trials = record["trials"]
    bars = dict(_barred(trials, record["bars"]))
    shown_always = {summary.OURS, *summary.RESTARTS, *(rival for rival, _ in bars)}
    lines = [
        "| downtime | " + " | ".join(FAULT_WORDS[fault] for fault in FAULTS) + " |",
        "|---|" + "---|" * len(FAULTS),
    ]
    for rival, words in RIVALS.items():
        if rival in shown_always or rival in trials:
            cells = [_cell(trials, rival, fault, bars.get((rival, fault))) for fault in FAULTS]
            lines.append(f"| {words} | " + " | ".join(cells) + " |")
    note = RIVALS_NOTE.format(ranks=RANKS, cpus=record["machine"]["cpus"], few=summary.FEW)
    return [*lines, "", *textwrap.wrap(note, WIDTH, break_on_hyphens=False)]


def _barred(trials: Mapping[str, Any], bars: Mapping[str, float]) -> Iterator[tuple[tuple[str, str], float]]:
    """(rival, fault) → the least ratio. All that restart, where none of them was measured."""
    for name, bar in bars.items():
        kind, _, other = name.partition("_over_ours_")
        for fault in (PLANNED,) if kind == "planned" else UNPLANNED:
            measured = [rival for rival in summary.RESTARTS if _median(trials, rival, fault) is not None]
            best = sorted(measured, key=lambda rival, fault=fault: trials[rival][fault]["median"])[:1]
            named = BARRED[other]
            for rival in (best or summary.RESTARTS) if named is None else [named]:
                yield (rival, fault), bar


def _median(trials: Mapping[str, Any], rival: str, fault: str) -> float | None:
    found = trials.get(rival, {}).get(fault, {}).get("median")
    return None if found is None else float(found)


def _cell(trials: Mapping[str, Any], rival: str, fault: str, bar: float | None) -> str:
    found = trials.get(rival, {}).get(fault, {})
    asked = "" if bar is None else f"{NOT_MEASURED}: {asked_for(bar, 'x', least=True)}"
    if "cannot" in found:
        return "cannot"
    if not found:
        return asked or "not measured"
    n, ratio = found["n"] - found["failed"], found.get("over_ours")
    failed = f"{found['failed']} of {found['n']} failed" if found["failed"] else ""
    few = f"**n = {n}**" if n < summary.FEW else ""
    if "median" not in found:
        return ", ".join(filter(None, (f"**{failed}**", asked)))
    cell = number(found["median"], "s") + _brackets(range_of({**found, "n": n}, "s"), few, failed)
    if ratio is None:
        return ", ".join(filter(None, (cell, asked)))
    asked = "" if bar is None else judged(ratio["median"], bar, "x", least=True)
    mixed = "of several commits" if ratio["mixed_commits"] else ""
    return f"{cell}, {number(ratio['median'], 'x')}" + _brackets(range_of(ratio, "x"), asked, mixed)


def _brackets(*told: str) -> str:
    words = [each for each in told if each]
    return f" ({', '.join(words)})" if words else ""


def table_of_profile(record: Record) -> list[str]:
    """The largest costs of each, as `bench_profile.py` has named them."""
    lines = ["| of | the largest costs |", "|---|---|"]
    for row in ROWS["profile"]:
        costs = record["figures"].get(row.figure, ())
        if costs:
            named = [
                f"{cost['share'] * 100:.0f} % `{cost['file']}:{_short(cost['function'])}`" for cost in costs
            ]
            lines.append(f"| {row.words} | {', '.join(named)} |")
    return lines


def _short(function: str) -> str:
    """A function in C++ without its arguments."""
    return re.split(r"[<(]", function)[0] or function if "::" in function else function


TABLES = {"baselines": table_of_rivals, "profile": table_of_profile}


def section(records: Sequence[Record]) -> str:
    """What stands in the README between the marks, without them."""
    if not records:
        return "No run has been recorded yet.\n"
    lines = [measured_on(records)]
    for record in records:
        trials = [row["n"] for row in faults_of(record)]
        number_of = "" if not trials else f", {_range(trials)} trials of each"
        lines += ["", f"**{TITLES[record['name']]}** ({origin_of(record)}{number_of})", ""]
        lines += TABLES.get(record["name"], table_of_figures)(record)
    return "\n".join(lines) + "\n"


def origin_of(record: Record) -> str:
    """The oldest day on which a part of it was measured, and all commits of which there are parts."""
    made = record.get("made") or {"all": {"at": record["at"], "commit": record["commit"]}}
    days = sorted(stamp["at"][:10] for stamp in made.values() if stamp["at"])
    commits = dict.fromkeys(stamp["commit"] or "" for stamp in made.values())
    known = sorted(filter(None, commits))
    unknown = "parts of unknown commits" if "" in commits and (known or len(made) > 1) else ""
    return ", ".join(filter(None, (*days[:1], *known, unknown)))


def faults_of(record: Record) -> list[Mapping[str, Any]]:
    """Of all rivals and faults, what the trials of that were."""
    found = [about for rival in record.get("trials", {}).values() for about in rival.values()]
    return [about for about in found if "n" in about]


def _range(values: Iterable[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def measured_on(records: Sequence[Record]) -> str:
    """Where and how."""
    machines = [
        f"{record['machine']['cpus']} processors ({record['machine']['processor']}, "
        f"Linux {record['machine']['kernel'].partition('-')[0]})"
        for record in records
    ]
    versions: dict[str, list[str]] = {}
    for record in records:
        for package, version in record["versions"].items():
            versions.setdefault(package, []).append(version)
    told = [f"{name} {' and '.join(dict.fromkeys(found))}" for name, found in sorted(versions.items())]
    where = f"On {' and '.join(dict.fromkeys(machines))}, {', '.join(told)}; {WHAT}. {HOW}"
    return textwrap.fill(where, WIDTH, break_on_hyphens=False, break_long_words=False)


def with_section(text: str, made: str) -> str:
    """The README with this between the marks. ValueError when they are not there, each once."""
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md: expected {BEGIN.strip()} and then {END.strip()}, once each")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + made + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="results", type=Path, default=ROOT / "build" / "bench", metavar="DIR")
    taken = take(parser.parse_args().results)
    README.write_text(with_section(README.read_text(), section(kept_records())))
    print(f"newer runs: {', '.join(taken) or 'none'}; the README's tables are made")


if __name__ == "__main__":
    main()
