"""What a rank does when another one fails: stop, say where, and go on as all do.

A failure inside a step discards it; at the vote it depends on whether anybody saw the vote succeed, which the
coordinator finds out. Whatever fails while the ranks go on together begins it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from tm_slurm.comm import HandshakeRefused
from tm_slurm.runtime.agent_link import Message
from tm_slurm.runtime.handover import Outgoing
from tm_slurm.runtime.pipelines import forget_broken_step
from tm_slurm.runtime.recording import begin_recording, keep_recording
from tm_slurm.runtime.role import Role
from tm_slurm.runtime.saying import say
from tm_slurm.runtime.sharing import Shares
from tm_slurm.runtime.storing import CannotGoBack
from tm_slurm.runtime.vote import FAILURES, Discarded, Vote, failure_in
from tm_slurm.runtime.worker import Worker
from tm_slurm.state import Mark, StateError, capture
from tm_slurm.state.entries import MODULE, OBJECT, end_broken_passes, state_entries

POSITION_CHARS = 200
"""So much of what an entry of the state says of itself (a data position is short) goes into a report."""

DISTURBANCES = (StateError, HandshakeRefused, OSError, *FAILURES)
"""What going on can end with when something else fails meanwhile."""


class Surviving:
    """The part of the runtime that is about failures of others."""

    state: dict[str, Any]
    step: int
    shares: Shares
    role: Role
    _worker: Worker | None
    _vote: Vote
    _mark: Mark | None
    _discarded: bool
    _resolution: Message | None
    _exchange_due: bool
    _first_step: int
    _keys_told: set[int]

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around the body of the loop: a failure of another rank inside it discards the step instead of
        ending this process. The loop then yields the same step again."""
        try:
            yield
        except Discarded:
            self._discarded = True
        except Exception as error:  # what frameworks make of a failed collective may be of any class
            failure = failure_in(error)
            if failure is None and self._worker is not None and self._worker.endpoint.sandbox:
                # Made-up answers may be its cause; if not, it comes again in a real step.
                say(f"a shadow step has failed, this standby is not as warm as it could be: {error!r}")
                self._forget_broken_shadow_step()
                return
            if failure is None or self._worker is None or self._worker.endpoint.sandbox:
                self._say_failing()
                raise
            torn = self._vote.was_held
            self._resolution = self._stop(self._worker, failure, at_vote=False, torn=torn)
            self._discarded = True
            forget_broken_step()

    def _forget_broken_shadow_step(self) -> None:
        forget_broken_step()
        for _, kind, value in state_entries(self.state):
            if kind == MODULE:
                end_broken_passes(value)

    def _say_failing(self) -> None:
        """The user's step has failed: tell the agent where, for whoever looks for the cause."""
        worker = self._worker
        if worker is None or worker.endpoint.sandbox:
            return
        position: dict[str, Any] = {}
        for key, kind, value in state_entries(self.state):
            if kind == OBJECT and not isinstance(value, LRScheduler):
                with contextlib.suppress(Exception):  # the user's code; the failure itself must be heard of
                    position[key] = repr(value.state_dict())[:POSITION_CHARS]
        failing = {"kind": "failing", "rank": worker.rank, "step": self.step, "position": position}
        with contextlib.suppress(OSError):
            worker.link.send(failing)

    def _failed_at_vote(self, error: RuntimeError) -> None:
        if self._worker is None or self._worker.endpoint.sandbox:
            raise error
        self._resolution = self._stop(self._worker, error, at_vote=True)
        if "back_to" in self._resolution or int(self._resolution["target"]) == self.step:
            raise Discarded

    def _stop(
        self,
        worker: Worker,
        error: Exception,
        *,
        at_vote: bool = False,
        begun: bool = True,
        torn: bool = False,
    ) -> Message:
        """Say that and where this rank has stopped; what all do now."""
        lost = getattr(error, "rank", None)
        told = {"kind": "broken", "rank": worker.rank, "epoch": worker.epoch, "lost": lost}
        if isinstance(error, CannotGoBack):
            told["refused"] = [error.source, error.step]
        worker.link.send({**told, "why": str(error)[:500]})
        worker.stop_at(self.step, at_vote=at_vote, begun=begun, torn=torn)
        order = worker.await_resolution()
        if order["kind"] != "resolve":
            self._end_process(1)
        return order

    def _go_on(self, order: Message) -> None:
        """All survivors are at the same boundary now, or go back to one: let the lost ranks' successors in,
        and give them the state."""
        worker = self._worker
        assert worker is not None
        if self._discarded and self._mark is not None:
            self._rewind()
        while True:
            try:
                self._follow(worker, order)
                self._exchange_due = True
                return
            except DISTURBANCES as error:
                order = self._stop(worker, error, torn=isinstance(error, CannotGoBack))

    def _rewind(self) -> None:
        """Back to the beginning of the step."""
        assert self._mark is not None
        self._mark.rewind()
        self.shares.rewind()

    def _follow(self, worker: Worker, order: Message) -> None:
        back_to = order.get("back_to")
        if back_to is not None and back_to.get("again"):
            self._begin_again(worker, order)
            return
        worker.recovered(order)
        if back_to is not None:
            self.step = worker.storing.go_back(back_to, self.state, self._rank_of(worker))
            self._mark = None
            self.shares.take_role(self._rank_of(worker), self.state)
        else:
            self._share_out(worker, order)
        for rank in order["serve"]:
            number, count = order["shares"][str(rank)]
            self._serve(worker, rank, int(order["epoch"]), (int(number), int(count)))

    def _share_out(self, worker: Worker, order: Message) -> None:
        """Do the shares of these absent ranks from now on; what is known of those that others do is kept."""
        given = {int(rank): told for rank, told in order["adopt"].items()}
        for rank, private in self.shares.adopt(order["keep"], given).items():
            assert worker.wards is not None
            worker.wards.keep(rank, self.step, private)
        if given:
            worker.link.send({"kind": "adopted", "epoch": int(order["epoch"]), "rank": worker.rank})

    def _serve(self, worker: Worker, rank: int, epoch: int, share: tuple[int, int]) -> None:
        """Give a lost rank's successor this replica's share of the state."""
        outgoing = Outgoing(
            host=worker.place.host,
            secret=worker.secret,
            rank=rank,
            epoch=epoch,
            share=share,
            limits=worker.limits,
        )
        worker.serving(outgoing)
        try:
            outgoing.give_layout(capture(self.state, self.step))
            ready = {"kind": "source_ready", "epoch": epoch, "rank": rank, "source": outgoing.source}
            worker.link.send({**ready, "share": share})
            outgoing.send(capture(self.state, self.step))
        finally:
            worker.serving(None)
            outgoing.close()

    def _begin_again(self, worker: Worker, order: Message) -> None:
        """Nothing that counts is done yet: everybody builds again, at the new epoch."""
        self._build_and_survive(worker, order, self._rank_of(worker), worker.world_size)

    def _build_and_survive(self, worker: Worker, order: Message, rank: int, world_size: int) -> None:
        """Build this rank's role with everybody else; when somebody fails meanwhile, begin again."""
        while True:
            try:
                epoch = int(order["epoch"])
                begin_recording(worker)
                self._enter(worker, rank=rank, world_size=world_size, epoch=epoch, peers=order["peers"])
                keep_recording(worker, self.state, self.role)
                self.step = 0
                back_to = order.get("back_to")
                if back_to is not None and back_to["source"] == "checkpoint":
                    self.step = worker.storing.go_back(back_to, self.state, rank)
                else:
                    worker.storing.gone_back(0)
                self._first_step = self.step
                self._keys_told.clear()
                self._exchange_due = True
                return
            except Exception as error:  # as in `attempt`
                failure = error if isinstance(error, CannotGoBack) else failure_in(error)
                if failure is None:
                    raise
                self.step = 0
                worker.rank, worker.world_size = rank, world_size
                order = self._stop(worker, failure, begun=False)

    @staticmethod
    def _rank_of(worker: Worker) -> int:
        assert worker.rank is not None
        return worker.rank

    def _enter(
        self, worker: Worker, *, rank: int, world_size: int, epoch: int, peers: dict[str, list[Any]]
    ) -> None:
        """Become `rank`, with a role of its own."""
        raise NotImplementedError

    def _end_process(self, code: int) -> Any:
        raise NotImplementedError
