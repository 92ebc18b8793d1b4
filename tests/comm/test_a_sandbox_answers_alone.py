"""With `sandbox` on, collectives answer at once as if all ranks were copies of this one; no peer exists."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gang import Member, gang


def alone(me: Member) -> None:
    """A default group of 3 of which nobody else exists."""
    peers = me.hear()
    me.endpoint.configure(rank=1, epoch=4, term=1, peers=peers)
    from tm_slurm import comm

    comm.register(me.endpoint)
    dist.init_process_group("tm", store=dist.HashStore(), rank=1, world_size=3)
    me.endpoint.sandbox = True
    own = torch.arange(6.0)

    tensor = own.clone()
    work = dist.all_reduce(tensor, async_op=True)
    assert work.is_completed()
    assert torch.equal(tensor, own)
    assert torch.equal(work.get_future().wait()[0], own)
    dist.broadcast(tensor, 0)
    dist.reduce(tensor, 2)
    dist.recv(tensor, 2)
    dist.send(tensor, 2)
    dist.barrier()
    assert torch.equal(tensor, own)

    slots = [torch.zeros(6) for _ in range(3)]
    dist.all_gather(slots, own)
    assert all(torch.equal(slot, own) for slot in slots)
    flat = torch.zeros(18)
    dist.all_gather_into_tensor(flat, own)
    assert torch.equal(flat, torch.cat([own, own, own]))
    piece = torch.zeros(2)
    dist.reduce_scatter_tensor(piece, own)
    assert torch.equal(piece, own[2:4])
    dist.reduce_scatter(piece, [own[0:2], own[2:4], own[4:6]])
    assert torch.equal(piece, own[2:4])
    exchanged = torch.zeros(6)
    dist.all_to_all_single(exchanged, own)
    assert torch.equal(exchanged, own)
    assert me.endpoint.stats()["frames_sent"] == 0
    me.endpoint.sandbox = False


@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
def test_every_collective_has_its_identity() -> None:
    with gang() as members:
        member = members.start(alone, 1)
        table = members.table([member])
        member.tell(table)
        member.result()
