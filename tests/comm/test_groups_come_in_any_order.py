"""Groups need no meeting, may be used before others have made theirs, and share one link a pair."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gang import Member, gang
from one_process import World, all_reduce, backend, world


def in_subgroups(me: Member) -> dict[str, float]:
    size = me.join_world()
    found = {}
    plan = {"low": [0, 1], "high": [2, 3], "even": [0, 2], "odd": [1, 3]}
    order = list(plan) if me.rank < 2 else list(reversed(plan))
    groups = {
        name: dist.new_group(plan[name], use_local_synchronization=True, group_desc=name)
        for name in order
        if me.rank in plan[name]
    }
    for name in sorted(groups, reverse=bool(me.rank % 2)):
        groups[name] = (groups[name], dist.all_reduce(torch.ones(1), group=groups[name], async_op=True))
    for name, (group, work) in groups.items():
        work.wait()
        tensor = torch.full((50_000,), float(me.rank))
        dist.all_reduce(tensor, group=group)
        found[name] = tensor[-1].item()
    dist.barrier()
    assert len(me.endpoint.linked()) < size
    return found


def test_new_group_in_different_orders() -> None:
    with gang() as members:
        found = [member.result() for member in members.world(in_subgroups, 4)]
    assert found == [
        {"low": 1.0, "even": 2.0},
        {"low": 1.0, "odd": 4.0},
        {"even": 2.0, "high": 5.0},
        {"odd": 4.0, "high": 5.0},
    ]


def test_a_group_may_be_used_before_the_others_have_made_it() -> None:
    with world(2) as w:
        for elements in (10, 100_000):
            name = f"late{elements}"
            first = backend(w.endpoints[0], 0, [0, 1], name)
            tensors = [torch.full((elements,), 1.0), torch.full((elements,), 2.0)]
            works = [first.allreduce([tensors[0]])]
            all_reduce(w.backends, 50_000)  # the waiting message holds nobody up
            second = backend(w.endpoints[1], 1, [0, 1], name)
            works.append(second.allreduce([tensors[1]]))
            for work in works:
                work.wait()
            assert torch.equal(tensors[0], torch.full((elements,), 3.0))
            assert torch.equal(tensors[0], tensors[1])


def test_collectives_of_two_groups_in_opposite_order() -> None:
    """Each rank waits for one group before it posts to the other: links must not make them queue."""
    with world(2) as w:
        a, b = w.group([0, 1], "a"), w.group([0, 1], "b")
        tensors = [torch.ones(200_000) for _ in range(4)]
        works = [
            a[0].allreduce([tensors[0]]),
            b[0].allreduce([tensors[1]]),
            b[1].allreduce([tensors[2]]),
        ]
        works[1].wait()
        works[2].wait()
        works.append(a[1].allreduce([tensors[3]]))
        for work in works:
            work.wait()
        assert all(torch.equal(tensor, torch.full((200_000,), 2.0)) for tensor in tensors)


def test_a_large_world_needs_few_links() -> None:
    with world(32, keepalive_s=0) as w:
        all_reduce(w.backends, 10)
        all_reduce(w.backends, 10_000)
        for work in [of.barrier() for of in w.backends]:
            work.wait()
        assert max(len(of.linked()) for of in w.endpoints) <= 2 * 5 + 4


SCRIPT = """
import sys
import torch, torch.distributed as dist
from tm_slurm import comm
how = sys.argv[1]
of = comm.Endpoint(secret=b"s" * 32, job="j", host="127.0.0.1", incarnation=0)
here = comm.Peer("127.0.0.1", of.port, 0)
of.configure(rank=0, epoch=0, term=1, peers={0: here, 1: comm.Peer("127.0.0.1", 1, 0)})
comm.register(of)
dist.init_process_group("tm", store=dist.HashStore(), rank=0, world_size=2)
work = dist.all_reduce(torch.ones(3), async_op=True)  # nobody will answer
work.get_future().then(lambda future: None)
if how == "destroy":
    dist.destroy_process_group()
elif how == "close":
    of.close()
elif how == "raise":
    raise SystemExit(3)
print("end")
"""


@pytest.mark.parametrize(("how", "code"), [("destroy", 0), ("close", 0), ("leave", 0), ("raise", 3)])
def test_the_interpreter_ends_cleanly_whatever_is_in_flight(how: str, code: int) -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert (ended.returncode, ended.stderr) == (code, "")


def test_a_group_that_is_destroyed_fails_what_it_had_in_flight() -> None:
    made = World(2)
    try:
        work = made.backends[0].allreduce([torch.ones(3)])
        made.backends.clear()
        with pytest.raises(RuntimeError, match="destroyed"):
            work.wait()
    finally:
        made.close()
