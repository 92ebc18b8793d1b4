"""Whatever happens to nodes, processes and the leader: training ends with the bits of an undisturbed run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))

from chaos import Chaos
from chaos_plan import KINDS, RANKS, RESERVE, STANDBYS, draw
from cluster_names import own_name

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
FAULTS = 3


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    with LocalCluster(nodes=RANKS + STANDBYS, mode="namespaces", name=own_name("chaos")) as cluster:
        yield Chaos(cluster, tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize("seed", [18, 23])
def test_a_run_under_chaos_ends_as_if_nothing_had_been(chaos: Chaos, seed: int) -> None:
    report = chaos.run(draw(seed, FAULTS))
    assert report["complaints"] == []


def test_a_seed_draws_the_same_plan_each_time_and_never_more_nodes_than_there_are() -> None:
    plans = [draw(seed, 5) for seed in range(200)]
    assert plans == [draw(seed, 5) for seed in range(200)]
    assert len({str(plan.faults) for plan in plans}) == 200
    assert {fault.kind for plan in plans for fault in plan.faults} == set(KINDS)
    for plan in plans:
        assert sum(KINDS[fault.kind].costs for fault in plan.faults) <= STANDBYS - RESERVE
