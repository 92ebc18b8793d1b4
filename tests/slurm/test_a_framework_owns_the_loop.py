"""PyTorch Lightning and Hugging Face's Trainer own the loop, in a job whose node is drained, and of which a
rank is killed: the bits at the end are those of an undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_jobs import TrainingJob, gates_of_a_move

from tm_slurm.localcluster import LocalCluster

pytestmark = pytest.mark.slurm
HERE = Path(__file__).parent
STEPS, MOVE_AT, KILL_AT = 60, 15, 40
STEPS_OF_OWN = 2000


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_a_job_of_a_framework_moves_and_survives(
    cluster: LocalCluster, tmp_path: Path, framework: str
) -> None:
    common = {"script": HERE / f"{framework}_training.py", "steps": STEPS}
    (tmp_path / "calm").mkdir()
    calm = TrainingJob.submit(cluster, tmp_path / "calm", standbys=0, **common).finish()

    gates = [*gates_of_a_move(MOVE_AT), KILL_AT]
    job = TrainingJob.submit(cluster, tmp_path, standbys=2, gates=gates, **common)
    job.warm(2)
    node = job.active_nodes()[1]
    cluster.drain(node, "disk")
    job.note("event_drain", node=node)
    job.pass_gates(MOVE_AT)
    assert job.note("moved")["pairs"][0]["leaver"] == node
    job.at_step(KILL_AT - 1)
    job.kill_rank(job.seats()[0])
    job.note("recover")
    job.open_gate(KILL_AT)
    job.note("recovered")
    assert job.finish() == calm
    assert [step["step"] for step in job.files.steps()] == list(range(STEPS))
    losses = [step["loss"] for step in job.files.steps()]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_a_loop_of_ones_own_moves(cluster: LocalCluster, tmp_path: Path) -> None:
    """The example, as it is submitted; its steps take so little that a move comes at any of them."""
    config = HERE.parents[1] / "configs" / "own_loop.yaml"
    place = f"{tmp_path}/%j"
    calm = TrainingJob.submit_config(
        cluster, config, job__standbys=0, job__directory=place, train__steps=STEPS_OF_OWN
    )
    job = TrainingJob.submit_config(cluster, config, job__directory=place, train__steps=STEPS_OF_OWN)
    job.warm(1)
    node = job.active_nodes()[1]
    assert "will move" in job.tm_slurm("migrate", str(job.job_id), "--node", node).stdout
    assert job.note("moved")["pairs"][0]["leaver"] == node
    assert job.finish() == calm.finish()


@pytest.mark.parametrize("example", ["lightning_gpt", "transformers_gpt", "own_loop"])
def test_an_example_runs_in_one_process_as_well(example: str, tmp_path: Path) -> None:
    done = alone("-m", f"tm_slurm.examples.{example}", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0: step 200" in done.stdout


LIGHTNING = """
import torch
from pytorch_lightning import Trainer
from tm_slurm.examples.lightning_gpt import Module, TextWindows
from tm_slurm.integrations import StepBatches, run
from tm_slurm.integrations.lightning import TrainMover, trainer_options

class Validated(Module):
    def validation_step(self, batch, batch_idx): ...

class ByEpoch(Module):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

def fit(role):
    trainer = Trainer(callbacks=[TrainMover()], logger=False, **{**trainer_options(role), **SETTINGS})
    batches = [StepBatches(TextWindows(), role, batch_size=8)]
    trainer.fit(MODULE(), *batches * (2 if MODULE is Validated else 1))

run(fit, steps=1)
"""
TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from tm_slurm.examples.text_windows import TextWindows
from tm_slurm.integrations import run
from tm_slurm.integrations.transformers import TrainMover

def fit(role):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments("out", use_cpu=True, report_to="none", **SETTINGS)
    trainer = Trainer(model, arguments, train_dataset=TextWindows())
    trainer.add_callback(TrainMover(trainer, role))

run(fit, steps=1)
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            LIGHTNING.replace("SETTINGS", "{'enable_checkpointing': True}").replace("MODULE", "Module"),
            "TrainMover does without Lightning's checkpoints (enable_checkpointing=False; "
            "tm_slurm has its own)",
        ),
        (
            LIGHTNING.replace("SETTINGS", "{'limit_val_batches': 1}").replace("MODULE", "Validated"),
            "TrainMover does without validation (limit_val_batches=0, and validate checkpoints in a job of "
            "its own)",
        ),
        (
            LIGHTNING.replace("SETTINGS", "{}").replace("MODULE", "ByEpoch"),
            "a schedule by epoch: give its interval as 'step' (configure_optimizers): there is one endless "
            "epoch here",
        ),
        (
            TRANSFORMERS.replace("SETTINGS", "{}"),
            "save_strategy: expected 'no', found 'steps': policy.checkpoint_every_steps writes checkpoints; "
            "save the model after train()",
        ),
        (
            TRANSFORMERS.replace("SETTINGS", "{'save_strategy': 'no', 'eval_strategy': 'steps'}").replace(
                "train_dataset=TextWindows()", "train_dataset=TextWindows(), eval_dataset=TextWindows()"
            ),
            "eval_strategy: expected 'no', found 'steps': evaluate after train(), or checkpoints in a job of "
            "its own",
        ),
    ],
    ids=["checkpoints", "validation", "epochs", "saving", "evaluating"],
)
def test_what_could_not_be_taken_over_is_refused(script: str, said: str, tmp_path: Path) -> None:
    done = alone("-c", script, directory=tmp_path)
    assert done.stderr.splitlines()[-1].removeprefix("[rank0]: ") == f"ValueError: {said}", done.stderr


def alone(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Python outside a job."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TM_SLURM", "SLURM"))}
    return subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
