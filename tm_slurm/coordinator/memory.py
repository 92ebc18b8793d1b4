"""What a leader knows of the job, from its first input on: all that the next one needs to go on.

It is a function of the journal. A new leader repeats every input of those before it; or it begins with what
one of them had summed up (see tm_slurm.coordinator.summary), and repeats what came after.
"""

from __future__ import annotations

import contextlib

from tm_slurm.coordinator.actions import Action, Comment, Spread, Tell
from tm_slurm.coordinator.decide import Decisions
from tm_slurm.coordinator.deciding import Input
from tm_slurm.coordinator.model import JobState, Plan
from tm_slurm.coordinator.news import News
from tm_slurm.coordinator.orders import Orders
from tm_slurm.coordinator.wards import wards_of
from tm_slurm.events import Event
from tm_slurm.events.event import EventError

MALFORMED = (KeyError, TypeError, ValueError)
"""What the decisions raise for a message that lacks something, or has it in the wrong type."""


class Memory:
    """`decisions` hold the state; `orders`: what nodes may not have heard yet; `news`: the same of what all
    are to hear; `seen`: the events that were taken, in order; `comment`: what the Slurm job's comment is to
    say; `inputs`: how many there were."""

    def __init__(self, plan: Plan, node: str) -> None:
        self.decisions = Decisions(JobState.initial(plan), node)
        self.orders = Orders()
        self.news = News()
        self.seen: list[Event] = []
        self.comment: Comment | None = None
        self.inputs = 0

    def take(self, given: Input) -> list[Action]:
        """Decide about one input; whoever leads acts on what comes of it. One of MALFORMED where it lacks
        something."""
        self.inputs += 1
        if "events" in given:
            with contextlib.suppress(EventError, *MALFORMED):
                self.seen += [Event.from_json(event) for event in given["events"]]
        if given["kind"] in ("node_lost", "released"):  # what comes of that name later is another agent
            self.orders.drop(given["node"])
        actions = self.decisions.handle(given)
        for action in actions:
            self.comment = action if isinstance(action, Comment) else self.comment
        return actions

    def repeat(self, term: int, given: Input) -> None:
        """The same for one that a leader before has acted on, in its term."""
        try:
            for action in self.take(given):
                if isinstance(action, Tell):
                    self.orders.add(action, term, whole=not wards_of(action.message))
                elif isinstance(action, Spread):
                    self.news.add(action.message)
        except MALFORMED:
            pass  # as it was refused when it came
