"""The thirty likeliest mistakes, each as somebody makes it: the line that is said, and the exit code.

A line says what was expected, what was found, and what to do. What a mistake in a configuration file looks
like in general is in test_config_mistakes_are_one_line.py, what sbatch refuses in
test_submit_refuses_what_cannot_run.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_job import Batch
from click.testing import CliRunner
from decisions_world import World as Decisions
from job_on_disk import RECORD, VERDICT, Job, status_of
from login_node import Login
from torch import nn

from tm_slurm.cli.app import main
from tm_slurm.comm import native
from tm_slurm.coordinator.actions import End
from tm_slurm.doctor import nodes
from tm_slurm.doctor.finding import Finding
from tm_slurm.runtime import Runtime
from tm_slurm.runtime.sharing import Shares
from tm_slurm.runtime.vote import Ballot, Vote
from tm_slurm.state import StateError, capture
from tm_slurm.state.binding import bind
from tm_slurm.state.layout import layout_of


@dataclass(frozen=True)
class Answer:
    """What is said. `code`: None where it is an exception of the user's own process."""

    said: str
    code: int | None = None


class World:
    """What a test has at hand, made when a mistake needs it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch

    def submit(self, *words: str, config: str | None = None) -> Answer:
        """`tm-slurm submit job.yaml` on a login node of a cluster of six nodes in one partition, `batch`."""
        self.monkeypatch.chdir(self.root)
        self.monkeypatch.setenv("PATH", f"{self.root / 'bin'}:/usr/bin:/bin")
        self.monkeypatch.setenv("XDG_STATE_HOME", str(self.root / "state"))
        self.monkeypatch.delenv("SLURM_CONF", raising=False)
        login = Login(self.root)
        if config is not None:
            login.write(config)
        result = login.submit(*words)
        assert not login.submitted
        return Answer(result.stderr, result.exit_code)

    def sbatch(self, *words: str, **environment: str) -> Answer:
        """The template, in a job of six nodes."""
        done = Batch(self.root).run(*words, **environment)
        return Answer(done.stderr, done.returncode)

    def type(self, *words: str) -> Answer:
        result = CliRunner().invoke(main, list(words))
        return Answer(result.stderr, result.exit_code)

    def of_job(self, *words: str, scontrol: str | None = None, **files: Any) -> Answer:
        """A command about job 7, of which these files are there."""
        self.monkeypatch.setenv("PATH", f"{self.root / 'bin'}:/usr/bin:/bin")
        self.monkeypatch.setenv("XDG_STATE_HOME", str(self.root / "state"))
        (self.root / "slurm.conf").write_text("ClusterName=here\n")
        self.monkeypatch.setenv("SLURM_CONF", str(self.root / "slurm.conf"))
        job = Job(self.root)
        (job.dir / "config.yaml").write_text("job: {name: small}\ntrain: {module: this}\n")
        for name, content in files.items():
            job.write(f"{name}.json", content)
        if scontrol is not None:
            job.slurm(f"echo '{scontrol}'")
        result = job.run(*words)
        return Answer(result.stderr, result.exit_code)


def another_torch(world: World) -> Answer:
    """An installation next to ours, which comes first."""
    place = world.root / "site"
    (place / "torch-2.9.0.dist-info").mkdir(parents=True)
    (place / "torch-2.9.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.9.0+cpu\n")
    world.monkeypatch.syspath_prepend(str(place))
    return world.submit()


def raised(kind: type[Exception], act: Callable[[], Any]) -> Answer:
    with pytest.raises(kind) as error:
        act()
    return Answer(str(error.value))


def voting(state: dict[str, Any]) -> Vote:
    vote = Vote(Ballot())
    vote.watch(state)
    vote.open()
    return vote


class Wrapper(torch.optim.Optimizer):
    """As frameworks wrap an optimizer: one by its class, which has been set up by nobody."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def an_optimizer_that_a_framework_wraps() -> None:
    model = nn.Linear(2, 2)
    voting({"model": model, "optimizer": Wrapper(torch.optim.SGD(model.parameters()))})


def an_optimizer_that_build_keeps_to_itself() -> None:
    model = nn.Linear(2, 2)
    voting({"model": model})
    torch.optim.AdamW(model.parameters()).step()


def a_build_that_depends_on_a_global() -> None:
    layers = [nn.Linear(2, 2)]

    def build() -> dict[str, Any]:
        layers.append(nn.Linear(2, 2))
        return {"model": nn.Sequential(*layers)}

    bind(layout_of(capture(build(), 0)), build())


def a_state_of_objects() -> None:
    class Data:
        def state_dict(self) -> dict[str, Any]:
            return {"file": Path("corpus")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    capture({"data": Data()}, 0)


def a_step_inside_a_share() -> None:
    shares = Shares()
    for share in shares.list():
        with share:
            shares.check_outside()


def no_number_of_steps() -> None:
    Runtime(lambda role: {})


def a_node_that_does_not_come() -> str:
    world = Decisions(nodes=2, active=2)
    world.start(without=("n2",))
    world.give({"kind": "start_expired"})
    (end,) = [action for action in world.actions if isinstance(action, End)]
    return end.reason


def shown(finding: Finding) -> str:
    return f"{finding.found}: {finding.meaning}: {finding.mend}"


BAD_ELF = "/x/_tm.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda"
MODULE = "job: {nodes: 1}\ntrain: {module: MODULE}\n"
PYTHON = sys.executable
ANOTHER = {"n2": {"missing": ["n1"]}}

MISTAKES: dict[str, tuple[Callable[[World], Answer], int | None, str]] = {
    # before submitting
    "the name of the partition is wrong": (
        lambda world: world.submit("--set", "job.partition=bach"),
        2,
        "Error: job.partition: no partition 'bach'; did you mean batch?",
    ),
    "the partition has too few nodes for the standbys": (
        lambda world: world.submit("--standbys", "3"),
        2,
        "Error: job.nodes 4 and job.standbys 3 need 7 nodes, partition batch has 6 for a job: ask for fewer, "
        "or set job.partition",
    ),
    "a key is misspelt": (
        lambda world: world.submit(config="job: {nodez: 4}"),
        2,
        "Error: job.yaml:1: unknown key job.nodez; did you mean job.nodes?",
    ),
    "the script is somewhere else": (
        lambda world: world.submit(config="train: {script: no.py}"),
        2,
        "Error: train.script: no such file: {root}/no.py",
    ),
    "the module is not installed": (
        lambda world: world.submit(config="train: {module: no.such}"),
        2,
        f"Error: train.module: no module no.such in {{root}} or what {PYTHON} has installed",
    ),
    "the program is said twice": (
        lambda world: world.submit(config="train: {module: json, script: train.py}"),
        2,
        "Error: job.yaml:1: train.script: expected 'module' or 'script', found both",
    ),
    "a number is said in words": (
        lambda world: world.submit(config="job: {nodes: four}\ntrain: {script: train.py}"),
        2,
        "Error: job.yaml:1: job.nodes: expected a whole number, found the text 'four'",
    ),
    "the ranks do not fit the nodes": (
        lambda world: world.submit(
            config="job: {nodes: 3, ranks: 8, ranks_per_node: 2}\ntrain: {script: train.py}"
        ),
        2,
        "Error: job.yaml:1: job.ranks: 8 ranks with ranks_per_node: 2 need nodes: 4, found nodes: 3",
    ),
    "torch is of another version": (
        another_torch,
        2,
        f"Error: torch 2.9.0: {PYTHON} needs torch 2.13.0, which tm_slurm is built for: pip install "
        "torch==2.13.0",
    ),
    "the configuration is not a file": (
        lambda world: world.type("submit", f"{world.root}/none.yaml"),
        2,
        "Error: {root}/none.yaml: cannot be read: No such file or directory",
    ),
    # the template
    "no configuration is given to the template": (
        lambda world: world.sbatch("train.steps=5"),
        2,
        "tm_slurm: train.steps=5: cannot be read: No such file or directory",
    ),
    "sbatch asks for fewer nodes than the configuration": (
        lambda world: world.sbatch(SLURM_JOB_NUM_NODES="3", SLURM_NNODES="3"),
        2,
        "tm_slurm: the job has 3 nodes, the configuration needs job.nodes 4: use sbatch --nodes=6",
    ),
    "the template is run outside Slurm": (
        lambda world: world.sbatch(SLURM_JOB_ID="", SLURM_JOB_NUM_NODES="", SLURM_NNODES=""),
        2,
        "tm_slurm: not in a Slurm job: this runs in a batch script (sbatch sbatch_templates/train.sbatch)",
    ),
    "the environment is not activated": (
        lambda world: world.sbatch(TM_SLURM_PYTHON="/usr/bin/false"),
        2,
        "tm_slurm: /usr/bin/false has no tm_slurm: activate its environment, or set TM_SLURM_PYTHON",
    ),
    # about a job
    "a command is misspelt": (
        lambda world: world.type("stauts"),
        2,
        "Error: no command 'stauts'; did you mean status?",
    ),
    "the job's id is wrong": (
        lambda world: world.of_job("status", "77"),
        3,
        "Error: no tm_slurm job 77: expected a job id, a job's name or a job directory (see `squeue --me`)",
    ),
    "no job is running": (
        lambda world: world.of_job("report", verdict=VERDICT),
        3,
        "Error: no job of yours is running here: give a job id, a name or a job directory (see `squeue "
        "--me`)",
    ),
    "the node to leave is not said": (
        lambda world: world.of_job("migrate", "7", status=status_of()),
        2,
        "Error: Missing option '--node'.",
    ),
    "a node is to be left that waits in the queue": (
        lambda world: world.of_job(
            "migrate", "7", "--node=n1", scontrol=RECORD.format("PENDING", "Resources")
        ),
        2,
        "Error: job 7 is pending (Resources): no ranks to move yet",
    ),
    "a node is to be left when training is over": (
        lambda world: world.of_job("migrate", "7", "--node=n1", verdict=VERDICT),
        2,
        "Error: job 7 has ended: completed",
    ),
    "there is nothing to report yet": (
        lambda world: world.of_job("report", "7"),
        3,
        "Error: job 7 has done no step yet: there is nothing to report from {root}/jobs/7",
    ),
    "the plan is for no job at all": (
        lambda world: world.type("plan", "--gpus", "0"),
        2,
        "Error: Invalid value for '--gpus': 0 is not in the range 1<=x<=67108864.",
    ),
    # the cluster
    "the job directory is not shared": (
        lambda world: Answer(shown(nodes.shared_directory("/tmp/jobs", {}, ANOTHER))),
        None,
        "/tmp/jobs is not shared: n2: nothing of n1: every node would have a job directory of its own: "
        "agents would not find each other: job.directory: a path on a file system that all nodes mount "
        "read-write; doctor --directory DIR",
    ),
    "a node never comes": (
        lambda world: Answer(a_node_that_does_not_come()),
        None,
        "node n2 did not start within policy.start_timeout_s and no standby is ready: logs/agent-n2.log says "
        "why; where there is none, see by `tm-slurm doctor` whether the nodes share job.directory and reach "
        "each other",
    ),
    "the range of ports is blocked": (
        lambda world: Answer(shown(nodes.ports({"n1": {"refused": {"n2": "timed out"}}}))),
        None,
        "n1 → n2 timed out: ranks and agents connect to each other on ephemeral TCP ports: let nodes reach "
        "each other there: `sysctl net.ipv4.ip_local_port_range` is the range to open",
    ),
    # the script
    "the native part was built for another torch": (
        lambda world: Answer(native.explained(ImportError(BAD_ELF))),
        None,
        f"the native part of tm_slurm was built for another torch than {torch.__version__}: pip install "
        f"--no-build-isolation --force-reinstall --no-deps . (in a checkout: make setup); {BAD_ELF}",
    ),
    "two frameworks hold the optimizer": (
        lambda world: raised(ValueError, an_optimizer_that_a_framework_wraps),
        None,
        "optimizer: a Wrapper only wraps an optimizer: let build() return the one inside it",
    ),
    "the optimizer is not returned by build": (
        lambda world: raised(ValueError, an_optimizer_that_build_keeps_to_itself),
        None,
        "an optimizer (AdamW) that build() has not returned is about to change parameters: return it from "
        "build(), or its state stays behind when the rank moves",
    ),
    "build depends on a global": (
        lambda world: raised(StateError, a_build_that_depends_on_a_global),
        None,
        "model/2.weight: this rank has it, the sender has not; build() must make the same model whenever it "
        "is called: let it depend on its role alone, on nothing global",
    ),
    "a state holds what cannot be moved": (
        lambda world: raised(StateError, a_state_of_objects),
        None,
        "data/.file: a pathlib.PosixPath cannot be encoded safely; let state_dict() return numbers, strings, "
        "bytes, tensors, NumPy arrays, or lists, tuples, sets and dictionaries of them",
    ),
    "the optimizer steps inside a share": (
        lambda world: raised(RuntimeError, a_step_inside_a_share),
        None,
        "optimizer.step() inside a share: apply the gradients after the loop over tm_slurm.shares(), when "
        "all shares are done",
    ),
    "the number of steps is not said": (
        lambda world: raised(ValueError, no_number_of_steps),
        None,
        "how many steps? Pass steps=… or set train.steps in the config",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_to_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act, code, line = MISTAKES[name]
    answer = act(World(tmp_path, monkeypatch))
    assert (answer.said.strip().splitlines()[-1], answer.code) == (
        line.replace("{root}", str(tmp_path)),
        code,
    )
    assert "Traceback" not in answer.said


def test_there_are_thirty() -> None:
    assert len(MISTAKES) >= 30
