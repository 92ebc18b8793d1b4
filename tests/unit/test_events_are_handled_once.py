"""An event has an identity: it is handled once, and survives being written down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tm_slurm.events import KINDS, SOURCES, Event, EventError, Seen

DRAIN = Event(id="drain/n3/100", kind="drain", node="n3", source="poll", reason="disk", at=100.5)


def test_the_same_fact_from_two_sources_is_handled_once() -> None:
    seen = Seen()
    assert seen.first_time(DRAIN)
    assert not seen.first_time(replace(DRAIN, source="strigger", at=115.0))
    assert seen.first_time(replace(DRAIN, id="drain/n3/200"))
    assert DRAIN.id in seen and len(seen) == 2


def test_memory_is_bounded_and_the_oldest_is_forgotten() -> None:
    seen = Seen(limit=3)
    for number in range(3):
        seen.first_time(replace(DRAIN, id=str(number)))
    seen.first_time(replace(DRAIN, id="0"))  # spoken of again: young
    seen.first_time(replace(DRAIN, id="3"))
    assert len(seen) == 3 and "1" not in seen and "0" in seen
    with pytest.raises(ValueError, match="at least 1"):
        Seen(limit=0)


_events = st.builds(
    Event,
    id=st.text(),
    kind=st.sampled_from(sorted(KINDS)),
    node=st.text(),
    source=st.sampled_from(sorted(SOURCES)),
    reason=st.text(),
    at=st.floats(allow_nan=False, allow_infinity=False),
    rank=st.none() | st.integers(min_value=0),
    deadline=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)


@given(_events)
def test_an_event_survives_json(event: Event) -> None:
    assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event


def test_unknown_fields_are_ignored() -> None:
    assert Event.from_json({**DRAIN.to_json(), "colour": "red"}) == DRAIN


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("id", 3),
        ("kind", "explosion"),
        ("node", None),
        ("source", "rumour"),
        ("reason", ["disk"]),
        ("at", "yesterday"),
        ("at", True),
        ("deadline", "soon"),
        ("rank", -1),
        ("rank", True),
        ("rank", 1.5),
    ],
)
def test_what_is_no_event_is_an_error_that_names_the_field(field: str, wrong: object) -> None:
    with pytest.raises(EventError, match=field) as error:
        Event.from_json({**DRAIN.to_json(), field: wrong})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["id", "kind", "node", "source", "reason", "at"])
def test_a_field_that_is_missing_is_an_error(field: str) -> None:
    value = DRAIN.to_json()
    del value[field]
    with pytest.raises(EventError, match=field):
        Event.from_json(value)
