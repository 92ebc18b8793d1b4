"""One leader at a time, terms that only grow, and a journal that survives its writer."""

from __future__ import annotations

import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tm_slurm.coordinator.election import LeaderFile, Leadership, write_atomically
from tm_slurm.coordinator.journal import Journal


def leader_file(**fields: object) -> LeaderFile:
    known = LeaderFile("n1", "10.0.0.1", 1234, 1, 0, time.time() + 60)
    return replace(known, **fields)  # type: ignore[arg-type]


def test_only_one_leads(tmp_path: Path) -> None:
    first, second = Leadership(tmp_path, 0), Leadership(tmp_path, 0)
    assert first.try_to_lead() and not second.try_to_lead()
    first.resign()
    assert second.try_to_lead()


def test_terms_grow(tmp_path: Path) -> None:
    first = Leadership(tmp_path, 0)
    assert first.try_to_lead() and first.term == 1
    leader_file(term=1).write(tmp_path)
    first.resign()
    second = Leadership(tmp_path, 0)
    assert second.try_to_lead() and second.term == 2


def test_a_running_lease_is_respected_even_without_the_lock(tmp_path: Path) -> None:
    leader_file(term=4).write(tmp_path)
    assert not Leadership(tmp_path, 0).try_to_lead()
    leader_file(term=4, lease_until=time.time() - 1).write(tmp_path)
    late = Leadership(tmp_path, 0)
    assert late.try_to_lead() and late.term == 5


def test_the_lease_of_the_job_before_its_requeue_does_not_count(tmp_path: Path) -> None:
    leader_file(attempt=0).write(tmp_path)
    assert Leadership(tmp_path, 1).try_to_lead()


def test_an_unreadable_leader_file_is_no_leader(tmp_path: Path) -> None:
    (tmp_path / "leader.json").write_text("{")
    assert LeaderFile.read(tmp_path) is None
    assert Leadership(tmp_path, 0).try_to_lead()


def test_files_are_replaced_whole_and_private(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x.json", "{}")
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_the_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(3):
        journal.append({"kind": "x", "number": number})
    journal.close()
    assert [record["number"] for record in Journal.replay(path)] == [0, 1, 2]


def test_a_half_written_last_line_is_dropped_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"number":0}\n{"numb')
    assert [record["number"] for record in Journal.replay(path)] == [0]
    journal = Journal(path)
    journal.append({"number": 1})
    journal.close()
    assert [record["number"] for record in Journal.replay(path)] == [0, 1]


def test_a_record_that_the_disk_does_not_take_whole_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append({"number": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.raises(OSError):
            journal.append({"number": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    journal.append({"number": 2})
    assert [record["number"] for record in Journal.replay(path)] == [0, 2]
