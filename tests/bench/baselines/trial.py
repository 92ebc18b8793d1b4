"""One fault put into one run of one rival, and what it has cost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from figures_record import stamp

from baselines import downtime
from baselines.downtime import Cost
from baselines.rival import DEATH, PLANNED, POWER_OFF, RANKS, UNPLUGGED, Rival
from baselines.site import Site
from baselines.steps import StepReader
from tm_slurm.localcluster import LocalCluster

CONFIG = Path(__file__).parents[3] / "configs" / "char_gpt.yaml"
CALM_STEPS = 25
"""Steps of all ranks before the fault; some of them with all that waits in reserve ready."""

BEGIN_LIMIT_S = 180.0
GO_ON_LIMIT_S = 150.0
LOOK_S = 0.05

Row = dict[str, Any]


def options() -> dict[str, Any]:
    """char_gpt's, as configs/char_gpt.yaml has them; no evaluation, which makes some steps longer."""
    found = yaml.safe_load(CONFIG.read_text())["train"]["options"]
    return {**found, "learning_rate": float(found["learning_rate"]), "eval_every": 0}


def at_once(fault: Callable[[], Any], told: Callable[[], Any]) -> float:
    """Have a fault happen, and an operator told at the same instant: to switch a node off takes a while, and
    what waits in reserve is not to wait for the end of that. Answers the wall-clock instant just before."""
    with ThreadPoolExecutor(1) as pool:
        at = time.time()
        happening = pool.submit(fault)
        told()
        happening.result()
    return at


class Trial:
    """One run. `number`: whose turn it is to be the victim; never rank 0, on whose node some rivals keep what
    all need."""

    def __init__(self, kind: type[Rival], fault: str, number: int, site: Site) -> None:
        self._rival = kind(site)
        self._fault = fault
        self._rank = 1 + number % (RANKS - 1)
        self._site = site
        self._log = StepReader(site.files.steps)

    def run(self) -> Row:
        """What came of it; a rival that does not go on is a row with `failed`, one that cannot be ended
        afterwards has `left_behind`."""
        row = self._run()
        try:
            self._site.end()
        except Exception as error:  # as below
            row["left_behind"] = repr(error)
        return row

    def _run(self) -> Row:
        about = {**stamp(), "load": round(os.getloadavg()[0], 2), "rank": self._rank}
        try:
            self._rival.start()
            self._until("all ranks train", BEGIN_LIMIT_S, lambda: self._all_did(1))
            self._until("its reserve is ready", BEGIN_LIMIT_S, self._rival.is_ready)
            begin = max(each.step for each in self._log.all())
            self._until("a steady pace", BEGIN_LIMIT_S, lambda: self._all_did(begin + CALM_STEPS))
            return {**about, **asdict(self._interrupt())}
        except Exception as error:  # whatever it is: one trial must not end a run of hours
            why = f"{type(error).__name__}: {error}"
            return {**about, "failed": why, "log": self._site.last_words()[-6000:]}

    def _all_did(self, step: int) -> bool:
        did = {each.rank for each in self._log.all() if each.step >= step}
        return did >= set(range(RANKS))

    def _interrupt(self) -> Cost:
        victim = downtime.process_of(self._log.all(), self._rank)
        assert victim is not None
        node = victim.partition(":")[0]
        at = self._inject(victim, node)
        ranks = self._rival.ranks_after

        def cost() -> Cost | None:
            self._rival.look_after()
            if self._fault == PLANNED:
                return downtime.planned(self._log.all(), leaver=victim, noticed_at=at, ranks=ranks)
            return downtime.unplanned(self._log.all(), at=at, victim=victim, ranks=ranks)

        found = self._until(f"{ranks} ranks go on", GO_ON_LIMIT_S, cost)
        assert isinstance(found, Cost)
        return found

    def _inject(self, victim: str, node: str) -> float:
        """The instant just before the fault; the rival's operator has been told."""
        cluster, pid = self._site.cluster, self._site.host_pid(victim)
        if self._fault == PLANNED:
            at = time.time()
            cluster.drain(node)
            self._rival.leave(node, self._rank)
            return at
        faults: dict[str, Callable[[], Any]] = {
            DEATH: lambda: os.kill(pid, signal.SIGKILL),
            POWER_OFF: lambda: cluster.power_off(node),
            UNPLUGGED: lambda: cluster.unplug(node),
        }
        return at_once(faults[self._fault], lambda: self._rival.lost(self._fault, node, self._rank))

    def _until(self, what: str, limit_s: float, test: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            found = test()
            if found:
                return found
            why = self._rival.why_not()
            if why is not None:
                raise AssertionError(f"in vain for {what}: {why}")
            time.sleep(LOOK_S)
        raise AssertionError(f"not within {limit_s:.0f} s: {what}")


def run(kind: type[Rival], fault: str, number: int, cluster: LocalCluster, directory: Path) -> Row:
    """One trial in a directory of its own."""
    return Trial(kind, fault, number, Site(cluster, directory, options())).run()
