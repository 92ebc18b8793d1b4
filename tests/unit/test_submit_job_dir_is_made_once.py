"""The job directory: private, made once whoever comes first, kept by a requeue, not shared with another
job.
"""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from tm_slurm.config import Config, load, loads
from tm_slurm.submit.job_dir import (
    SECRET_BYTES,
    JobDirError,
    claim,
    job_directory,
    prepare_job_dir,
    resolve,
    set_verdict_aside,
    shared_root,
)


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def config(root: Path, directory: str = "jobs") -> Config:
    text = f"job: {{directory: '{directory}'}}\ntrain: {{script: train.py}}\n"
    return resolve(loads(text, name="x"), base=root, python="/usr/bin/python3")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_in_it_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = prepare_job_dir(config(tmp_path), 7)
    finally:
        os.umask(old)
    assert path == tmp_path / "jobs" / "7"
    assert mode(path) == mode(path / "logs") == mode(path / "requests") == 0o700
    assert mode(path / "secret") == mode(path / "config.yaml") == 0o600
    assert len((path / "secret").read_bytes()) == SECRET_BYTES
    assert load(path / "config.yaml") == config(tmp_path)
    assert [entry.name for entry in path.parent.iterdir()] == ["7"], "no scaffolding is left"


def test_two_jobs_have_two_secrets(tmp_path: Path) -> None:
    first, second = (prepare_job_dir(config(tmp_path), job_id) for job_id in (7, 8))
    assert (first / "secret").read_bytes() != (second / "secret").read_bytes()


def race(root: Path, submission: str, barrier: object, results: object) -> None:
    os.environ["XDG_STATE_HOME"] = str(root / "state")
    barrier.wait(30)  # type: ignore[attr-defined]
    path = prepare_job_dir(config(root), 7, submission)
    results.put((path / "secret").read_bytes())  # type: ignore[attr-defined]


@pytest.mark.parametrize("leftover", [False, True], ids=["nothing there", "another job's directory there"])
def test_racing_agents_agree_on_one_secret(tmp_path: Path, leftover: bool) -> None:
    old = (prepare_job_dir(config(tmp_path), 7, "old") / "secret").read_bytes() if leftover else b""
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        barrier, results = context.Barrier(6), context.Queue()
        arguments = (tmp_path, f"submission{attempt}", barrier, results)
        agents = [context.Process(target=race, args=arguments) for _ in range(6)]
        for agent in agents:
            agent.start()
        secrets = {results.get(timeout=30) for _ in agents}
        for agent in agents:
            agent.join(30)
        assert len(secrets) == 1 and old not in secrets
        old = secrets.pop()


def test_a_requeued_job_finds_what_it_wrote(tmp_path: Path) -> None:
    first = prepare_job_dir(config(tmp_path), 7, "a")
    secret = (first / "secret").read_bytes()
    (first / "journal.0.jsonl").write_text("{}\n")
    for submission in ("a", None):
        assert prepare_job_dir(config(tmp_path), 7, submission) == first
        assert (first / "secret").read_bytes() == secret
        assert (first / "journal.0.jsonl").exists()


def test_another_job_with_the_same_id_starts_with_nothing_of_the_old_one(tmp_path: Path) -> None:
    """Ids begin anew with a cluster; a verdict or journal of another job would end or mislead this one."""
    first = prepare_job_dir(config(tmp_path), 7, "a")
    secret = (first / "secret").read_bytes()
    (first / "verdict.json").write_text("{}")
    assert prepare_job_dir(config(tmp_path), 7, "b") == first
    assert (first / "secret").read_bytes() != secret and not (first / "verdict.json").exists()
    assert (tmp_path / "jobs" / "7.old-a" / "verdict.json").exists()


def test_a_batch_script_claims_only_what_is_its_own(tmp_path: Path) -> None:
    path = prepare_job_dir(config(tmp_path), 7, "a")
    assert claim(path, "a")
    assert not claim(path, "b") and not path.exists()
    assert not claim(path, "b")


def test_verdicts_of_earlier_runs_are_kept_in_order(tmp_path: Path) -> None:
    path = prepare_job_dir(config(tmp_path), 7)
    set_verdict_aside(path)
    for number in range(2):
        (path / "verdict.json").write_text(str(number))
        set_verdict_aside(path)
    assert [(path / f"verdict.{number}.json").read_text() for number in range(2)] == ["0", "1"]
    assert not (path / "verdict.json").exists()


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "7").mkdir(parents=True)
    (tmp_path / "jobs" / "7" / "thesis.tex").touch()
    with pytest.raises(JobDirError, match="something else in it"):
        prepare_job_dir(config(tmp_path), 7)
    assert (tmp_path / "jobs" / "7" / "thesis.tex").exists()


def test_an_empty_directory_is_taken_and_made_private(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "7").mkdir(parents=True, mode=0o755)
    path = prepare_job_dir(config(tmp_path), 7)
    assert mode(path) == 0o700 and (path / "secret").exists()


def test_a_directory_that_was_opened_to_others_is_closed_again(tmp_path: Path) -> None:
    path = prepare_job_dir(config(tmp_path), 7, "a")
    path.chmod(0o755)
    assert mode(prepare_job_dir(config(tmp_path), 7, "a")) == 0o700


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_directory_is_not_followed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    if kind == "link":
        (tmp_path / "jobs" / "7").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "jobs" / "7").touch()
    with pytest.raises(JobDirError, match="something else") as error:
        prepare_job_dir(config(tmp_path), 7)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a directory away")
def test_somebody_elses_directory_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "7").mkdir(parents=True)
    os.chown(tmp_path / "jobs" / "7", 65534, 65534)
    with pytest.raises(JobDirError, match="somebody else"):
        prepare_job_dir(config(tmp_path), 7)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "jobs").touch()
    with pytest.raises(JobDirError, match=r"job\.directory") as error:
        prepare_job_dir(config(tmp_path), 7)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("written", "directory", "root"),
    [
        ("jobs", "/base/jobs/7", "/base/jobs"),
        ("/abs", "/abs/7", "/abs"),
        ("~/jobs", "/home/me/jobs/7", "/home/me/jobs"),
        ("/abs/%j", "/abs/7", "/abs"),
        ("/abs/run-%j/x", "/abs/run-7/x", "/abs"),
        ("a b/$HOME", "/base/a b/$HOME/7", "/base/a b/$HOME"),
    ],
)
def test_where_it_is(written: str, directory: str, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = config(Path("/base"), written)
    assert job_directory(found, 7) == Path(directory)
    assert shared_root(found) == Path(root)
    assert found.train.script == "/base/train.py" and found.job.python == "/usr/bin/python3"
