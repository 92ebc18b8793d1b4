"""Frameworks raise errors of their own from what a collective raised; it is the failure of another rank all
the same. What the user's code gets wrong by itself is not."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward

from tm_slurm.comm import PeerLost
from tm_slurm.runtime.vote import failure_in

LOST = PeerLost("lost the link to rank 3")


class Collective(torch.autograd.Function):
    """Stands for one that fails in a backward pass."""

    @staticmethod
    def forward(context: object, value: torch.Tensor) -> torch.Tensor:
        return value * 1

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        raise LOST


def test_a_pipeline_stages_error_is_the_peers() -> None:
    inputs = torch.ones(2, requires_grad=True)
    output = Collective.apply(inputs)
    with pytest.raises(RuntimeError, match="Failed to run stage backward") as caught:
        stage_backward((output,), (torch.ones(2),), [inputs])
    assert not isinstance(caught.value, PeerLost)
    assert failure_in(caught.value) is LOST


def test_an_error_of_its_own_is_none() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert failure_in(caught.value) is None
    assert failure_in(LOST) is LOST


def test_what_was_raised_while_a_failure_was_handled_counts_unless_it_says_otherwise() -> None:
    for hides, found in ((False, LOST), (True, None)):
        with pytest.raises(ValueError) as caught:
            try:
                raise LOST
            except PeerLost:
                if hides:
                    raise ValueError("a bug") from None
                raise ValueError("a bug")  # noqa: B904
        assert failure_in(caught.value) is found
