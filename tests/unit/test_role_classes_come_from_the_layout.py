"""Ranks of one class have parts of the same shapes at one place of a pipeline; users may name classes."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tm_slurm.runtime.recording import Turn, choose, share_of_cpus
from tm_slurm.sandbox import least_steps, role_class_of, shadow_steps_of_another_role
from tm_slurm.sandbox.role_class import stage_name


def state(width: int = 4, **more: Any) -> dict[str, Any]:
    return {"model": nn.Linear(width, 2), **more}


def stage(index: int, count: int) -> Any:
    return SimpleNamespace(_stage=SimpleNamespace(stage_index=index, num_stages=count))


def name_of(role_class: str) -> str:
    return role_class.rsplit("-", 1)[0]


def test_a_pipeline_has_three_classes_and_all_else_one() -> None:
    assert [stage_name(index, 4) for index in range(4)] == ["first", "middle", "middle", "last"]
    assert [stage_name(index, 2) for index in range(2)] == ["first", "last"]
    assert stage_name(0, 1) == "only"
    assert name_of(role_class_of(state())) == "only"
    classes = [role_class_of(state(schedule=stage(index, 4))) for index in range(4)]
    assert [name_of(found) for found in classes] == ["first", "middle", "middle", "last"]
    assert classes[1] == classes[2]


def test_other_shapes_or_types_are_another_class() -> None:
    assert role_class_of(state()) == role_class_of(state())
    assert role_class_of(state()) != role_class_of(state(5))
    assert role_class_of(state()) != role_class_of({"model": nn.Linear(4, 2).to(torch.bfloat16)})


@pytest.mark.parametrize(("given", "name"), [("expert 7", "expert-7"), ("../../etc", "etc"), ("é/", "named")])
def test_users_may_name_classes(given: str, name: str) -> None:
    found = role_class_of(state(role_class=given, schedule=stage(0, 4)))
    assert name_of(found) == name and found.isascii() and "/" not in found


def test_another_role_needs_one_shadow_step() -> None:
    assert shadow_steps_of_another_role(state(), 3) == 1
    assert least_steps(state()) == 1


def test_a_share_of_the_cpus_holds_for_all_threads_and_ends() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU cannot be shared")
    seen: dict[str, set[int]] = {}
    begun, done = threading.Event(), threading.Event()

    def other() -> None:
        seen["inside"] = os.sched_getaffinity(0)
        begun.set()
        assert done.wait(10)
        seen["after"] = os.sched_getaffinity(0)

    thread = threading.Thread(target=other)
    with share_of_cpus(0.5):
        thread.start()
        assert begun.wait(10)
        assert len(os.sched_getaffinity(0)) == -(-len(before) // 2)
    assert os.sched_getaffinity(0) == before
    done.set()
    thread.join(10)
    assert len(seen["inside"]) < len(before) and seen["after"] == before


@pytest.mark.parametrize(
    ("ranks", "ordered", "slot", "per_node", "expected"),
    [
        ([0, 1, 4, 5], 0, 0, 2, Turn(0, range(0, 2))),
        ([0, 1, 4, 5], 1, 1, 2, Turn(1, range(0, 2))),
        ([2, 3, 6, 7], 1, 1, 2, Turn(3, range(2, 4))),  # no rank of the ordered node is of this class
        ([0, 3], 1, 1, 2, Turn(3)),  # no node is wholly of this class
        ([1, 4], 0, 0, 2, Turn(1)),
        ([0, 1, 2], 2, 2, 2, Turn(2)),  # a guest's slot
        ([0, 1, 2], 2, 0, 1, Turn(2)),
    ],
)
def test_the_processes_of_a_node_warm_up_for_a_whole_one(
    ranks: list[int], ordered: int, slot: int, per_node: int, expected: Turn
) -> None:
    assert choose(ranks, ordered, slot, per_node) == expected


def test_a_batch_is_whole_or_not_at_all() -> None:
    mates = {0: ["a", 1, 10], 1: ["a", 2, 11]}
    assert Turn(3, range(2, 4)).peers(mates) == {"2": mates[0], "3": mates[1]}
    assert Turn(3, range(2, 4)).peers({0: mates[0]}) == {}
    assert Turn(3).peers(mates) == {}
