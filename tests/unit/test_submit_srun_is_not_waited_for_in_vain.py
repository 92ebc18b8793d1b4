"""When the job has its verdict its batch script ends, whatever srun still waits for; and nothing else is
ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batch_job import Batch

from tm_slurm.config import loads
from tm_slurm.submit import step_watch
from tm_slurm.submit.job_dir import prepare_job_dir, resolve
from tm_slurm.submit.submission import script_text
from tm_slurm.submit.verdict import NoVerdict, read_verdict

LIMIT_S = 30.0
COMPLETED = {"state": "completed", "exit_code": 0, "reason": "done"}


def until(what: str, test: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not test():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:.0f} s: {what}"
        time.sleep(0.02)


def waiting_srun(folder: Path, job_dir: Path | None = None) -> Path:
    """A program named srun that starts another one, as the real one does, leaves a verdict in `job_dir`, and
    never ends by itself."""
    program = folder / "srun"
    verdict = "" if job_dir is None else f"open({str(job_dir / 'verdict.json')!r}, 'w').write('''VERDICT''')"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, signal\n"
        "child = os.fork()\n"
        f"if child:\n    {verdict or 'pass'}\n"
        "signal.pause()\n".replace("VERDICT", json.dumps(COMPLETED))
    )
    program.chmod(0o755)
    return program


def naming(words: str) -> list[int]:
    """Processes with these words in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if words.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


# ---- the two batch scripts, whole ----


def test_the_template_ends_with_the_verdict_while_srun_waits(tmp_path: Path) -> None:
    batch = Batch(tmp_path)
    waiting_srun(tmp_path / "bin", batch.job_dir)
    done = batch.run()
    assert done.returncode == 0, done.stderr
    assert "tm_slurm: completed: done exit_code=0" in done.stdout
    assert "srun still waits for tasks: ending srun" in done.stderr
    until("nothing is left of the job", lambda: not naming(str(batch.root)))


def test_a_submitted_script_ends_with_the_verdict_while_srun_waits(tmp_path: Path) -> None:
    text = f"job: {{nodes: 2, directory: {tmp_path}/%j}}\ntrain: {{module: t}}\n"
    config = resolve(loads(text, name="x"), base=tmp_path, python=sys.executable)
    job_dir = prepare_job_dir(config, 7, "0123456789abcdef")
    (tmp_path / "bin").mkdir()
    waiting_srun(tmp_path / "bin", job_dir)
    script = tmp_path / "script.sh"
    script.write_text(script_text(config, "0123456789abcdef"))
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, check=False, env=environment, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "tm_slurm: completed: done exit_code=0" in done.stdout
    until("nothing is left of the job", lambda: not naming(str(job_dir)))


# ---- what is ended, and what is not ----

QUICK = (
    "import sys; from tm_slurm.submit import step_watch as w; w.LOOK_S = w.GRACE_S = 0.05; "
    "w.main(sys.argv[1:])"
)


class Script:
    """A batch script with a quick watcher; `rest` is what it does then."""

    def __init__(self, folder: Path, rest: str) -> None:
        self.folder = folder
        self.marker = str(folder)
        srun = shlex.quote(str(waiting_srun(folder)))
        watcher = f"{shlex.quote(sys.executable)} -c {shlex.quote(QUICK)} {shlex.quote(self.marker)} $$"
        agents = f"{srun} --nodes=2 python -m tm_slurm.agent --job-dir {shlex.quote(self.marker)}"
        text = f"srun={srun}\nagents() {{ {agents}; }}\n{watcher} </dev/null & disown\n{rest}\n"
        self.bash = subprocess.Popen(["bash", "-c", text], stdout=subprocess.PIPE, text=True)

    def watchers(self) -> list[int]:
        return [pid for pid in naming(self.marker) if self.is_watcher(pid)]

    def is_watcher(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return QUICK.encode() in words and words[:2] != [b"bash", b"-c"]
        return False

    def verdict(self) -> None:
        new = self.folder / "new"
        new.write_text(json.dumps(COMPLETED))
        new.rename(self.folder / "verdict.json")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Script]]:
    made: list[Script] = []

    def make(rest: str) -> Script:
        made.append(Script(tmp_path, rest))
        return made[-1]

    yield make
    for script in made:
        script.bash.kill()
        for pid in naming(script.marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        script.bash.communicate(timeout=LIMIT_S)


def test_both_processes_of_srun_are_ended_and_then_the_script_goes_on(
    start: Callable[[str], Script],
) -> None:
    script = start('agents; echo "srun $?"')
    until("srun waits", lambda: len(step_watch.sruns_of(script.bash.pid)) == 2)
    script.verdict()
    assert script.bash.communicate(timeout=LIMIT_S)[0] == "srun 137\n"
    until("nothing is left of the job", lambda: not naming(script.marker))


def test_another_step_of_the_script_is_left_alone(start: Callable[[str], Script]) -> None:
    """A step that watches something, or one after training."""
    script = start('"$srun" monitor & agents; echo "srun $?"; wait $!')
    until("both steps are there", lambda: naming("\0monitor\0") and len(naming("tm_slurm.agent")) >= 2)
    other = set(naming("\0monitor\0"))
    script.verdict()
    assert script.bash.stdout is not None and script.bash.stdout.readline() == "srun 137\n"
    until("the watcher has ended", lambda: not script.watchers())
    assert {pid for pid in other if Path(f"/proc/{pid}").exists()} == other


def test_the_watcher_ends_at_once_when_the_script_does(
    start: Callable[[str], Script], tmp_path: Path
) -> None:
    """However slow the directory is: here the watcher is held up in reading a verdict that never comes."""
    os.mkfifo(tmp_path / "verdict.json")
    script = start("sleep infinity & echo $!; wait $!")
    assert script.bash.stdout is not None
    sleeper = int(script.bash.stdout.readline())
    held: list[int] = []

    def reads() -> bool:
        with contextlib.suppress(OSError):  # nobody reads yet
            held.append(os.open(tmp_path / "verdict.json", os.O_WRONLY | os.O_NONBLOCK))
        return bool(held)

    until("the watcher reads", reads)
    assert script.watchers()
    script.bash.kill()
    until("the watcher has ended", lambda: not script.watchers())
    os.kill(sleeper, signal.SIGKILL)
    os.close(held[0])


def test_who_waits_for_all_background_jobs_does_not_wait_for_the_watcher(
    start: Callable[[str], Script],
) -> None:
    script = start("wait; echo waited")
    assert script.bash.communicate(timeout=LIMIT_S)[0] == "waited\n"


# ---- whose verdict it is ----


@pytest.mark.parametrize(
    ("told", "attempt", "counts"),
    [({}, 3, True), ({"attempt": 3}, 3, True), ({"attempt": 2}, 3, False), ({"attempt": 1}, 0, False)],
)
def test_only_the_verdict_of_this_start_counts(
    tmp_path: Path, told: dict[str, int], attempt: int, counts: bool
) -> None:
    (tmp_path / "verdict.json").write_text(json.dumps({**COMPLETED, **told}))
    if counts:
        assert read_verdict(tmp_path, attempt).state == "completed"
    else:
        with pytest.raises(NoVerdict, match=f"restart {attempt} .* found that of restart {told['attempt']}"):
            read_verdict(tmp_path, attempt)


def test_an_earlier_starts_verdict_ends_no_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it end a job: the last line of the script looks at the same."""
    verdict = tmp_path / "verdict.json"
    verdict.write_text(json.dumps({**COMPLETED, "attempt": 0}))
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            verdict.write_text(json.dumps({**COMPLETED, "attempt": 1}))

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(step_watch.time, "sleep", sleep)
    monkeypatch.setattr(step_watch, "sruns_of", lambda script: [])
    step_watch.watch(tmp_path, os.getppid())
    assert looks == [step_watch.LOOK_S] * 3


@pytest.mark.parametrize("content", [None, "", '{"state": "compl'])
def test_a_directory_that_is_not_there_yet_or_half_written_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    job_dir = tmp_path / "later"

    def sleep(seconds: float) -> None:
        job_dir.mkdir(exist_ok=True)
        (job_dir / "verdict.json").write_text(json.dumps(COMPLETED))

    if content is not None:
        job_dir.mkdir()
        (job_dir / "verdict.json").write_text(content)
    monkeypatch.setattr(step_watch.time, "sleep", sleep)
    monkeypatch.setattr(step_watch, "sruns_of", lambda script: [])
    step_watch.watch(job_dir, os.getppid())
    assert read_verdict(job_dir, 0).state == "completed"
