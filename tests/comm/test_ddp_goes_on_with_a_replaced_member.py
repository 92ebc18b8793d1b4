"""DDP with members replaced between steps, or killed within one, ends bit for bit as undisturbed."""

from __future__ import annotations

import os
from typing import Any

import pytest
from ddp_training import Training, default_group
from gang import Gang, Member, Process, gang

from tm_slurm import comm

FIRST, LAST = 4, 8


def undisturbed(me: Member) -> str:
    me.join_world()
    training = Training(me.rank)
    training.steps(0, LAST)
    return training.digest()


def planned(me: Member, leavers: list[int]) -> tuple[str, bool]:
    """A stayer, or a leaver that hands its state over and exits at once."""
    me.join_world()
    training = Training(me.rank)
    group, reducer = default_group(), training.ddp.reducer
    training.steps(0, FIRST)
    if me.rank in leavers:
        me.tell(training.state())
        me.hear()
        os._exit(0)
    me.endpoint.prepare(epoch=1, changes=me.hear())
    me.tell("prepared")
    assert me.endpoint.wait_staged(epoch=1, ranks=leavers, timeout_s=20)
    me.tell("staged")
    me.hear()
    me.endpoint.switch(epoch=1)
    me.tell("switched")
    training.steps(FIRST, LAST)
    return training.digest(), group is default_group() and reducer is training.ddp.reducer


def joiner(me: Member, linked: list[int]) -> tuple[str, bool]:
    me.join_world(epoch=1)
    training = Training(me.rank, joiner=True)
    training.warm_up(me.endpoint)
    me.endpoint.dial(epoch=1, ranks=linked, timeout_s=20)
    me.tell("dialled")
    training.load(me.hear())
    training.steps(FIRST, LAST)
    return training.digest(), True


def reference(size: int) -> list[str]:
    with gang() as members:
        return [member.result() for member in members.world(undisturbed, size)]


def replace(members: Gang, world: list[Process], leavers: list[int], worker: Any) -> list[Process]:
    """Start joiners for the leavers' ranks and prepare everybody for epoch 1."""
    stayers = [member for member in world if member.rank not in leavers]
    joiners = [
        members.start(worker, rank, [stayer.rank for stayer in stayers], incarnation=1) for rank in leavers
    ]
    table = members.table(stayers + joiners)
    changes = {joiner.rank: joiner.peer for joiner in joiners}
    for stayer in stayers:
        stayer.tell(changes)
    for member in joiners:
        member.tell(table)
    for stayer in stayers:
        assert stayer.hear() == "prepared"
    for member in joiners:
        assert member.hear() == "dialled"
    for stayer in stayers:
        assert stayer.hear() == "staged"
    return joiners


@pytest.mark.parametrize(("size", "leavers"), [(3, [1]), (3, [0]), (4, [0, 2])])
def test_planned_replacement_changes_no_bit(size: int, leavers: list[int]) -> None:
    expected = reference(size)
    with gang() as members:
        world = members.world(planned, size, leavers)
        states = {rank: world[rank].hear() for rank in leavers}
        joiners = replace(members, world, leavers, joiner)
        stayers = [member for member in world if member.rank not in leavers]
        for member in joiners:
            member.tell(states[member.rank])
        for stayer in stayers:
            stayer.tell("switch")
        for stayer in stayers:
            assert stayer.hear() == "switched"
        for rank in leavers:
            world[rank].tell("exit")
        found = {member.rank: member.result() for member in stayers + joiners}
    assert [found[rank][0] for rank in range(size)] == expected
    assert all(same_objects for _, same_objects in found.values())


def dies_in_backward(me: Member, victim: int) -> tuple[str, str]:
    me.join_world()
    training = Training(me.rank)
    training.steps(0, FIRST)
    state = training.state()
    if me.rank == 0:
        me.tell(state)
    if me.rank == victim:
        next(iter(training.model.parameters())).register_hook(lambda _: os._exit(1))
        training.step(FIRST)
    try:
        training.step(FIRST)
        raised = "nothing"
    except (comm.PeerLost, comm.GroupInterrupted) as error:
        raised = type(error).__name__
    me.endpoint.prepare(epoch=1, changes=me.hear())
    me.tell("prepared")
    assert me.endpoint.wait_staged(epoch=1, ranks=[victim], timeout_s=20)
    me.tell("staged")
    me.endpoint.switch(epoch=1)
    training.steps(FIRST, LAST)
    return training.digest(), raised


def test_a_member_that_dies_in_backward_is_replaced_and_the_step_redone() -> None:
    size, victim = 3, 2
    expected = reference(size)
    with gang() as members:
        world = members.world(dies_in_backward, size, victim)
        state = world[0].hear()
        survivors = world[:2]
        joiners = replace(members, world, [victim], joiner)
        joiners[0].tell(state)
        results = [member.result() for member in survivors]
        digests = [digest for digest, _ in results] + [joiners[0].result()[0]]
    assert digests == expected
    assert "PeerLost" in {raised for _, raised in results}
