"""One leader at a time, terms that only grow, no clock that two machines would have to agree on, and a
journal that survives its writer."""

from __future__ import annotations

import json
import resource
import signal
import time
from pathlib import Path

import pytest

from tm_slurm.coordinator.clock import JobClock
from tm_slurm.coordinator.election import (
    CLAIM_LIMIT_S,
    Candidate,
    LeaderFile,
    Leadership,
    LeaderWatch,
    write_atomically,
)
from tm_slurm.coordinator.journal import Journal, create, replay

LEASE_S = 2.0


class Clock:
    """One machine's own clock, moved by the test."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Agent:
    """An agent's part in elections. `attempt`: how often Slurm has restarted the job."""

    def __init__(self, job_dir: Path, node: str, clock: Clock, attempt: int = 0) -> None:
        self.watch = LeaderWatch(job_dir, attempt, LEASE_S, clock)
        self.candidate = Candidate(self.watch, node=node, host="10.0.0.1")

    def claim(self) -> Leadership | None:
        return self.candidate.claim()

    def leads(self) -> Leadership:
        leadership = self.claim()
        assert leadership is not None
        return leadership


def test_at_the_start_nobody_waits(tmp_path: Path) -> None:
    assert Agent(tmp_path, "n1", Clock()).leads().term == 1


def test_only_one_leads_and_a_successor_of_one_that_resigns_need_not_wait(tmp_path: Path) -> None:
    clock = Clock()
    first, second = Agent(tmp_path, "n1", clock), Agent(tmp_path, "n2", clock)
    leadership = first.leads()
    assert second.claim() is None
    leadership.resign()
    assert not leadership.holds()
    assert second.leads().term == 2


def test_a_leader_that_renews_is_left_alone_for_ever(tmp_path: Path) -> None:
    clock = Clock()
    leadership, other = Agent(tmp_path, "n1", clock).leads(), Agent(tmp_path, "n2", clock)
    for _ in range(20):
        clock.now += LEASE_S / 2
        assert leadership.renew(7) and leadership.holds()
        assert other.claim() is None


def test_a_silent_leader_is_replaced_after_its_lease_and_not_before(tmp_path: Path) -> None:
    clock = Clock()
    Agent(tmp_path, "n1", clock).leads()
    other = Agent(tmp_path, "n2", clock)
    other.watch.look()
    clock.now += LEASE_S - 0.01
    assert other.claim() is None
    clock.now += 0.01
    assert other.leads().term == 2


def test_no_two_clocks_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine's clocks, its wall clock too, are years away from the other's."""
    fast, slow = Clock(5.0), Clock(1e8)
    leadership = Agent(tmp_path, "n1", fast).leads()
    monkeypatch.setattr(time, "time", lambda: 1.0)
    other = Agent(tmp_path, "n2", slow)
    other.watch.look()
    for _ in range(4):
        fast.now += LEASE_S / 2
        slow.now += LEASE_S / 2
        assert leadership.renew() and other.claim() is None
    slow.now += LEASE_S
    assert other.leads().term == 2


def test_a_watcher_that_was_frozen_looks_again_before_it_claims(tmp_path: Path) -> None:
    clock = Clock()
    leadership, other = Agent(tmp_path, "n1", clock).leads(), Agent(tmp_path, "n2", clock)
    other.watch.look()
    for _ in range(10):
        clock.now += LEASE_S / 4
        leadership.renew()
    assert other.claim() is None


def test_what_the_leader_says_counts_as_having_looked(tmp_path: Path) -> None:
    clock = Clock()
    leadership, other = Agent(tmp_path, "n1", clock).leads(), Agent(tmp_path, "n2", clock)
    other.watch.look()
    clock.now += LEASE_S - 0.1
    other.watch.heard(leadership.term, leadership.renewal, 0.0)
    clock.now += LEASE_S - 0.1
    assert other.claim() is None
    other.watch.heard(leadership.term - 1, 99, 0.0)  # an old leader's word does not
    clock.now += 0.1
    assert other.leads().term == 2


def test_a_leader_that_could_not_renew_for_its_lease_leads_no_more(tmp_path: Path) -> None:
    clock = Clock()
    leadership = Agent(tmp_path, "n1", clock).leads()
    assert leadership.renew(7)
    clock.now += LEASE_S
    before = (tmp_path / "leader.json").read_bytes()
    assert not leadership.holds() and not leadership.renew()
    leadership.resign()
    assert (tmp_path / "leader.json").read_bytes() == before
    clock.now -= LEASE_S / 2
    assert not leadership.holds()  # nor does it come back


def test_a_leader_that_finds_a_later_term_leads_no_more_and_writes_nothing(tmp_path: Path) -> None:
    first_clock, second_clock = Clock(), Clock()
    first, second = Agent(tmp_path, "n1", first_clock).leads(), Agent(tmp_path, "n2", second_clock)
    second.watch.look()
    second_clock.now += LEASE_S
    assert second.leads().term == 2  # the first one's clock has stood still, as in a frozen process
    assert first.holds() and not first.renew() and not first.holds()
    first.resign()
    known = LeaderFile.read(tmp_path)
    assert known is not None and known.term == 2 and not known.resigned


def test_an_older_leader_file_is_not_believed(tmp_path: Path) -> None:
    clock = Clock()
    watcher = Agent(tmp_path, "n3", clock)
    first = Agent(tmp_path, "n1", clock).leads()
    first.resign()
    second = Agent(tmp_path, "n2", clock).leads()
    watcher.watch.look()
    LeaderFile("n1", "10.0.0.1", 7, 1, 0, 99, 0.0).write(tmp_path)  # thawed in the middle of writing it
    known = watcher.watch.look()
    assert known is not None and known.node == "n2"
    assert second.renew(8)
    assert LeaderFile.read(tmp_path) == watcher.watch.look()


def test_a_file_system_that_fails_costs_the_lead_only_when_the_lease_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    leadership = Agent(tmp_path, "n1", clock).leads()

    def fails(self: LeaderFile, job_dir: Path) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(LeaderFile, "write", fails)
    clock.now += LEASE_S / 2
    assert leadership.renew() and leadership.holds()
    clock.now += LEASE_S / 2
    assert not leadership.renew() and not leadership.holds()


def test_whoever_dies_while_claiming_does_not_block_the_others(tmp_path: Path) -> None:
    clock = Clock()
    assert create(tmp_path, 0, 1)  # and then it died
    other = Agent(tmp_path, "n2", clock)
    assert other.claim() is None
    clock.now += CLAIM_LIMIT_S
    assert other.leads().term == 2


def test_whoever_sleeps_while_claiming_finds_that_another_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    slow, other = Agent(tmp_path, "n1", clock), Agent(tmp_path, "n2", clock)

    def create_and_sleep(job_dir: Path, attempt: int, term: int) -> bool:
        monkeypatch.undo()
        assert create(job_dir, attempt, term)
        assert other.claim() is None
        clock.now += CLAIM_LIMIT_S
        assert other.leads().term == 2
        return True

    monkeypatch.setattr("tm_slurm.coordinator.election.create", create_and_sleep)
    assert slow.claim() is None
    known = LeaderFile.read(tmp_path)
    assert known is not None and (known.node, known.term) == ("n2", 2)


def test_the_lease_of_the_job_before_its_requeue_does_not_count_but_its_term_does(tmp_path: Path) -> None:
    clock = Clock()
    Agent(tmp_path, "n1", clock).leads()
    assert Agent(tmp_path, "n2", clock, attempt=1).leads().term == 2


def test_an_unreadable_leader_file_is_no_leader(tmp_path: Path) -> None:
    (tmp_path / "leader.json").write_text("{")
    assert LeaderFile.read(tmp_path) is None
    assert Agent(tmp_path, "n1", Clock()).leads().term == 1


def test_a_deadline_is_as_far_away_for_the_next_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    first, other = Agent(tmp_path, "n1", clock).leads(), Agent(tmp_path, "n2", clock)
    assert first.renew(7)
    told = LeaderFile.read(tmp_path)
    assert told is not None
    other.watch.look()
    clock.now += LEASE_S
    wall = time.time()
    monkeypatch.setattr(time, "time", lambda: wall + 3600.0)  # the next leader's machine is an hour ahead
    assert other.leads().job_clock.now() == pytest.approx(told.at + LEASE_S, abs=0.5)


def test_the_wall_clock_is_the_jobs_time_where_it_is_in_step() -> None:
    counted = time.time() + 0.2
    assert JobClock(counted).now() == pytest.approx(time.time(), abs=0.05)


def test_files_are_replaced_whole_and_private(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x.json", "{}")
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


# ---- the journal ----


def journal(job_dir: Path, term: int, about: str = "n1") -> Journal:
    assert create(job_dir, 0, term)
    return Journal(job_dir, 0, term, {"batch_host": about})


def numbers(job_dir: Path) -> list[int]:
    return [record["number"] for record in replay(job_dir, 0)]


def test_the_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    first = journal(tmp_path, 1)
    for number in range(3):
        first.append({"kind": "x", "number": number})
    first.close()
    assert numbers(tmp_path) == [0, 1, 2]
    second = journal(tmp_path, 2)
    assert [record["number"] for _, record in second.inherited()] == [0, 1, 2]
    second.append({"number": 3})
    third = journal(tmp_path, 3)
    told = [(term, record["number"]) for term, record in third.inherited()]
    assert told == [(1, 0), (1, 1), (1, 2), (2, 3)] and numbers(tmp_path) == [0, 1, 2, 3]


def test_what_an_old_leader_writes_late_is_not_history(tmp_path: Path) -> None:
    first = journal(tmp_path, 1)
    first.append({"number": 0})
    second = journal(tmp_path, 2)
    first.append({"number": 666})
    second.append({"number": 1})
    third = journal(tmp_path, 3)
    first.append({"number": 667})
    second.append({"number": 668})
    assert [record["number"] for _, record in third.inherited()] == [0, 1] == numbers(tmp_path)


def test_the_first_leader_says_what_every_leader_must_agree_on(tmp_path: Path) -> None:
    assert journal(tmp_path, 1, about="n1").about == {"batch_host": "n1"}
    assert journal(tmp_path, 2, about="n2").about == {"batch_host": "n1"}


def test_a_term_that_was_claimed_and_never_led_leaves_no_gap(tmp_path: Path) -> None:
    journal(tmp_path, 1).append({"number": 0})
    assert create(tmp_path, 0, 2)
    (tmp_path / "journal.0.2.jsonl").write_bytes(b'{"kind":"continu')  # died while it wrote the first line
    third = journal(tmp_path, 3)
    third.append({"number": 1})
    assert numbers(tmp_path) == [0, 1]


def test_each_start_of_the_job_has_a_history_of_its_own(tmp_path: Path) -> None:
    journal(tmp_path, 1).append({"number": 0})
    assert create(tmp_path, 1, 2)
    assert list(Journal(tmp_path, 1, 2, {}).inherited()) == []


def test_a_half_written_last_line_does_not_count(tmp_path: Path) -> None:
    first = journal(tmp_path, 1)
    first.append({"number": 0})
    first.close()
    with (tmp_path / "journal.0.1.jsonl").open("ab") as file:
        file.write(b'{"numb')
    assert numbers(tmp_path) == [0]
    second = journal(tmp_path, 2)
    second.append({"number": 1})
    assert numbers(tmp_path) == [0, 1]
    head = json.loads((tmp_path / "journal.0.2.jsonl").read_text().splitlines()[0])
    with (tmp_path / "journal.0.1.jsonl").open("ab") as file:
        file.write(b'er":9}\n')
    assert head["kind"] == "continues" and numbers(tmp_path) == [0, 1]


def test_a_record_that_the_disk_does_not_take_whole_leaves_nothing_behind(tmp_path: Path) -> None:
    first = journal(tmp_path, 1)
    first.append({"number": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (first.path.stat().st_size + 5, hard))
    try:
        with pytest.raises(OSError):
            first.append({"number": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    first.append({"number": 2})
    assert numbers(tmp_path) == [0, 2]
