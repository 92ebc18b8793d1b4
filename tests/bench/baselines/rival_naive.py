"""tm_slurm's planned move with its techniques switched off, one by one (TrainMover's breakdown)."""

from __future__ import annotations

from typing import ClassVar

from baselines.rival import DEATH, POWER_OFF, UNPLUGGED
from baselines.rival_tm_slurm import TmSlurm

PLANNED_ONLY = "the switches are of planned moves; after a failure groups are never made anew"
OTHERS = dict.fromkeys((DEATH, POWER_OFF, UNPLUGGED), PLANNED_ONLY)
FAVOUR = "the joiner's process is up and has imported torch; links between stayers are kept"


class Naive(TmSlurm):
    name = "migration_naive"
    what = (
        "Migration Naive: in the pause all groups are made anew, the joiner builds its role and does a step"
    )
    settings: ClassVar = {
        **TmSlurm.settings,
        "comm": {"delta_groups": False},
        "standby": {"warm_up": False},
    }
    tuning: ClassVar = {**settings, "in its favour": FAVOUR}
    cannot: ClassVar = OTHERS


class DeltaGroups(TmSlurm):
    name = "migration_delta_groups"
    what = "Migration Naive and delta groups; the joiner still does all in the pause"
    settings: ClassVar = {**TmSlurm.settings, "standby": {"warm_up": False}}
    tuning: ClassVar = {**settings, "in its favour": FAVOUR}
    cannot: ClassVar = OTHERS
