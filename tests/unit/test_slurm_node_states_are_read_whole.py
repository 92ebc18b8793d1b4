"""Every spelling of a node's state is read whole: what is hidden behind a + or a mark is what matters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tm_slurm.slurm import NodeState

CASES = [
    # text, base, flags, leaving, drained
    ("IDLE", "IDLE", set(), None, False),
    ("MIXED", "MIXED", set(), None, False),
    ("ALLOCATED", "ALLOCATED", set(), None, False),
    ("MIXED+DRAIN", "MIXED", {"DRAIN"}, "drain", False),
    ("ALLOCATED+DRAIN", "ALLOCATED", {"DRAIN"}, "drain", False),
    ("IDLE+DRAIN", "IDLE", {"DRAIN"}, "drain", True),
    ("IDLE+COMPLETING+DRAIN", "IDLE", {"COMPLETING", "DRAIN"}, "drain", False),
    ("MIXED+DRAIN+MAINTENANCE+RESERVED", "MIXED", {"DRAIN", "MAINTENANCE", "RESERVED"}, "drain", False),
    ("ALLOCATED+MAINTENANCE", "ALLOCATED", {"MAINTENANCE"}, "maintenance", False),
    ("MIXED+DRAIN+REBOOT_REQUESTED", "MIXED", {"DRAIN", "REBOOT_REQUESTED"}, "reboot", False),
    ("MIXED+REBOOT_REQUESTED", "MIXED", {"REBOOT_REQUESTED"}, "reboot", False),
    ("ALLOCATED+REBOOT^", "ALLOCATED", {"REBOOT_ISSUED"}, "reboot", False),
    ("IDLE+DRAIN+REBOOT_ISSUED", "IDLE", {"DRAIN", "REBOOT_ISSUED"}, "reboot", True),
    ("DOWN", "DOWN", set(), "down", False),
    ("DOWN*", "DOWN", {"NOT_RESPONDING"}, "down", False),
    ("DOWN+NOT_RESPONDING", "DOWN", {"NOT_RESPONDING"}, "down", False),
    ("DOWN*+DRAIN", "DOWN", {"NOT_RESPONDING", "DRAIN"}, "down", True),
    ("ERROR", "ERROR", set(), "down", False),
    ("MIXED+NOT_RESPONDING", "MIXED", {"NOT_RESPONDING"}, None, False),
    ("MIXED+FAIL", "MIXED", {"FAIL"}, "fail", False),
    ("IDLE+FAIL+NOT_RESPONDING", "IDLE", {"FAIL", "NOT_RESPONDING"}, "fail", False),
    ("MIXED+PLANNED", "MIXED", {"PLANNED"}, None, False),
    ("IDLE+CLOUD+POWERED_DOWN", "IDLE", {"CLOUD", "POWERED_DOWN"}, "down", False),
    ("MIXED+CLOUD+POWERING_DOWN", "MIXED", {"CLOUD", "POWERING_DOWN"}, "down", False),
    ("ALLOCATED+POWER_DOWN", "ALLOCATED", {"POWER_DOWN"}, "drain", False),
    ("UNKNOWN", "UNKNOWN", set(), None, False),
    ("FUTURE", "FUTURE", set(), None, False),
    ("ALLOCATED+BLOCKED+NEW_IN_99", "ALLOCATED", {"BLOCKED", "NEW_IN_99"}, None, False),
    # sinfo's words and marks
    ("DRAINING", "ALLOCATED", {"DRAIN"}, "drain", False),
    ("draining@", "ALLOCATED", {"DRAIN", "REBOOT_REQUESTED"}, "reboot", False),
    ("DRAINED", "IDLE", {"DRAIN"}, "drain", True),
    ("drained*", "IDLE", {"DRAIN", "NOT_RESPONDING"}, "drain", True),
    ("drng", "ALLOCATED", {"DRAIN"}, "drain", False),
    ("drain", "IDLE", {"DRAIN"}, "drain", True),
    ("FAILING*", "ALLOCATED", {"FAIL", "NOT_RESPONDING"}, "fail", False),
    ("fail", "IDLE", {"FAIL"}, "fail", False),
    ("failg", "ALLOCATED", {"FAIL"}, "fail", False),
    ("MIXED@", "MIXED", {"REBOOT_REQUESTED"}, "reboot", False),
    ("REBOOT^", "IDLE", {"REBOOT_ISSUED"}, "reboot", False),
    ("boot^", "IDLE", {"REBOOT_ISSUED"}, "reboot", False),
    ("IDLE#", "IDLE", {"POWERING_UP"}, None, False),
    ("idle~", "IDLE", {"POWERED_DOWN"}, "down", False),
    ("idle!", "IDLE", {"POWER_DOWN"}, "drain", False),
    ("alloc%", "ALLOCATED", {"POWERING_DOWN"}, "down", False),
    ("alloc$", "ALLOCATED", {"MAINTENANCE"}, "maintenance", False),
    ("MAINT", "IDLE", {"MAINTENANCE"}, "maintenance", False),
    ("mix-", "MIXED", {"PLANNED"}, None, False),
    ("plnd", "IDLE", {"PLANNED"}, None, False),
    ("resv", "IDLE", {"RESERVED"}, None, False),
    ("comp*", "IDLE", {"COMPLETING", "NOT_RESPONDING"}, None, False),
    ("ALLOCATED+", "ALLOCATED", set(), None, False),
    ("inval", "IDLE", {"INVALID_REG"}, None, False),
    ("unk*", "UNKNOWN", {"NOT_RESPONDING"}, None, False),
    ("", "UNKNOWN", set(), None, False),
]


@pytest.mark.parametrize(("text", "base", "flags", "leaving", "drained"), CASES, ids=[c[0] for c in CASES])
def test_a_state_is_read_whole(
    text: str, base: str, flags: set[str], leaving: str | None, drained: bool
) -> None:
    state = NodeState.parse(text)
    assert (state.base, state.flags) == (base, flags)
    assert state.leaving() == leaving
    assert state.is_drained is drained


def test_a_node_in_a_maintenance_reservation_that_drains_is_not_healthy() -> None:
    """MIXED+DRAIN in a maintenance reservation was read as healthy."""
    assert NodeState.parse("MIXED+DRAIN+MAINTENANCE").leaving_kinds == ("drain", "maintenance")


@given(
    st.sampled_from(["IDLE", "ALLOCATED", "MIXED", "DOWN", "ERROR", "FUTURE", "UNKNOWN"]),
    st.frozensets(
        st.sampled_from(["DRAIN", "FAIL", "MAINTENANCE", "REBOOT_ISSUED", "NOT_RESPONDING", "COMPLETING"])
    ),
    st.randoms(),
)
def test_the_order_of_flags_does_not_matter(base: str, flags: frozenset[str], order: object) -> None:
    mixed = sorted(flags)
    order.shuffle(mixed)  # type: ignore[attr-defined]
    assert NodeState.parse("+".join([base, *mixed])) == NodeState(base, flags)  # type: ignore[arg-type]
    assert NodeState.parse(str(NodeState(base, flags))) == NodeState(base, flags)  # type: ignore[arg-type]
