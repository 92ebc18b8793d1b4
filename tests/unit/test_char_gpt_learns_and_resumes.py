"""The example learns from real text, always the same way, and goes on bit for bit after a move."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_examples import move

from tm_slurm.examples.char_gpt import build, evaluate, main, train_step
from tm_slurm.examples.char_gpt_data import read_text
from tm_slurm.examples.char_gpt_options import DataOptions, OptionsError, read_options
from tm_slurm.runtime import Role
from tm_slurm.state import digest, mark
from tm_slurm.state.generators import read_generators, write_generators

torch.set_num_threads(1)

SMALL = {
    "model": {"layers": 2, "heads": 2, "width": 64, "context": 32, "dropout": 0.1},
    "batch_size": 16,
    "eval_every": 0,
    "data": {"max_bytes": 1_000_000},
}


def start(rank: int = 0, world_size: int = 1, **given: Any) -> dict[str, Any]:
    return build(Role(rank=rank, world_size=world_size), read_options(SMALL | given))


def test_it_learns() -> None:
    state = start(learning_rate=0.005)
    unigram = state["data"].text.unigram_entropy()
    assert 4 < unigram < 5.5
    untrained = float(evaluate(state, 8))
    for step in range(120):
        train_step(state, step)
    assert untrained > 7.9
    assert float(evaluate(state, 8)) < unigram - 0.8  # measured: 3.5 where the unigrams have 4.7


def test_two_runs_end_with_the_same_bits() -> None:
    digests = []
    for _ in range(2):
        state = start()
        losses = [train_step(state, step)["loss"] for step in range(5)]
        digests.append((digest(state, 5, generators=True), torch.stack(losses).tolist()))
    assert digests[0] == digests[1]


def test_evaluating_changes_no_bit() -> None:
    digests = []
    for every in (0, 2):
        state = start(eval_every=every)
        metrics = [train_step(state, step) for step in range(4)]
        assert ["validation_bits_per_byte" in each for each in metrics] == [False, bool(every)] * 2
        digests.append(digest(state, 4, generators=True))
    assert digests[0] == digests[1]
    assert all(part.training for part in state["model"].modules())


def test_ten_steps_are_five_a_move_and_five() -> None:
    undisturbed = start()
    for step in range(10):
        train_step(undisturbed, step)
    expected = digest(undisturbed, 10, generators=True)

    leaver = start()
    for step in range(5):
        train_step(leaver, step)
    generators = read_generators()
    joiner = start()
    for step in range(3):  # shadow steps
        train_step(joiner, step)
    write_generators(generators)  # the leaver's, in its process
    _, report = move(leaver, joiner, step=5)
    for step in range(report.step, 10):
        train_step(joiner, step)
    assert digest(joiner, 10, generators=True) == expected


def test_a_step_can_be_done_again() -> None:
    state = start()
    train_step(state, 0)
    kept = mark(state)
    inputs, _ = state["data"].training(1)
    first = state["model"](inputs).detach().clone()
    kept.rewind()
    assert torch.equal(first, state["model"](inputs))


def test_ranks_start_with_one_model_and_draw_different_data_and_dropout() -> None:
    first = start(rank=0)
    first_dropout = torch.rand(4)
    second = start(rank=1)
    assert not torch.equal(first_dropout, torch.rand(4))
    assert digest({"model": first["model"]}) == digest({"model": second["model"]})
    assert not torch.equal(first["data"].training(3)[0], second["data"].training(3)[0])
    assert torch.equal(first["data"].validation(3)[0], second["data"].validation(3)[0])
    assert not torch.equal(first["data"].training(3)[0], first["data"].training(4)[0])


def _rank(rank: int, store: str, steps: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    state = start(rank, 2)
    losses = [float(train_step(state, step)["loss"]) for step in range(steps)]
    shared = {key: state[key] for key in ("model", "optimizer", "schedule")}
    results.put((rank, digest(shared), losses))
    dist.destroy_process_group()


def test_two_ranks_keep_the_same_weights(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, str(tmp_path / "store"), 4, results)) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    found = sorted(results.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    (_, first, first_losses), (_, second, second_losses) = found
    assert first == second
    assert first_losses != second_losses
    assert first_losses[0] == float(train_step(start(), 0)["loss"])  # alone, rank 0 draws the same


def test_text_of_another_node_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text " * 100)
    (tmp_path / "b.txt").write_bytes(b"other text" * 100)
    states = [start(data={"paths": [str(tmp_path / name)]}) for name in ("a.txt", "b.txt")]
    one, other = start(rank=1), start(rank=2)
    other["data"].load_state_dict(one["data"].state_dict())
    assert torch.equal(one["data"].training(3)[0], other["data"].training(3)[0])
    with pytest.raises(RuntimeError, match="every node needs the same files"):
        move(states[0], states[1])


def test_validation_text_is_not_trained_on(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02}.txt").write_text(f"file {number:02}. " * 10)
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\0")
    by_file = read_text(DataOptions(paths=[str(tmp_path)], validation_fraction=0.1))
    assert by_file.validation.tobytes() == b"".join(
        f"file {number:02}. ".encode() * 10 for number in range(9, 60, 10)
    )
    assert len(by_file.train) == 54 * 90
    (tmp_path / "one.txt").write_bytes(bytes(range(32, 127)) * 10)
    by_region = read_text(
        DataOptions(paths=[str(tmp_path / "one.txt")], validation_fraction=0.1, max_bytes=500)
    )
    assert by_region.train.tobytes() + by_region.validation.tobytes() == (bytes(range(32, 127)) * 10)[:500]
    assert len(by_region.validation) == 50


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modle": {}}, "train.options.modle: unknown option; did you mean model?"),
        ({"model": {"widht": 3}}, "train.options.model.widht: unknown option; did you mean width?"),
        ({"model": {"width": "3"}}, "train.options.model.width: int was expected, found '3'"),
        ({"model": {"width": True}}, "train.options.model.width: int was expected, found True"),
        ({"model": 3}, "train.options.model: options by name were expected, found 3"),
        ({"model": {"width": 30, "heads": 4}}, "train.options.model.width: a multiple of twice the 4 heads"),
        ({"model": {"dropout": 1}}, "train.options.model.dropout: at least 0 and below 1"),
        ({"batch_size": 0}, "train.options.batch_size: at least 1 was expected, found 0"),
        ({"learning_rate": float("nan")}, "train.options.learning_rate: more than 0"),
        ({"data": {"paths": "text"}}, "train.options.data.paths: a list of str was expected"),
    ],
)
def test_a_wrong_option_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError) as caught:
        read_options(given)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_it_runs_outside_a_job_and_says_what_it_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(
        "job: {nodes: 1}\n"
        "train:\n"
        "  module: tm_slurm.examples.char_gpt\n"
        "  steps: 3\n"
        "  options:\n"
        "    model: {layers: 1, heads: 1, width: 16, context: 16}\n"
        "    batch_size: 2\n"
        "    data: {max_bytes: 100000}\n"
    )
    assert main([str(config)]) == 0
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert "trained steps=3" in line
    assert "validation_bits_per_byte=" in line and "unigram_entropy_bits_per_byte=4." in line


def test_a_wrong_config_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("train:\n  module: tm_slurm.examples.char_gpt\n  options: {learningrate: 1}\n")
    found = subprocess.run(
        [sys.executable, "-m", "tm_slurm.examples.char_gpt", str(config)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},  # torch's own, beside packages of the extra `bench`
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1 and "did you mean learning_rate?" in found.stderr
