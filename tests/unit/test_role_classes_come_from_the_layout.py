"""Ranks of one class have parts of the same shapes at one place of a pipeline; users may name classes."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tm_slurm.runtime.recording import share_of_cpus
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
