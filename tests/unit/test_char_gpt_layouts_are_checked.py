"""A layout that the ranks, the model or the batch cannot have is one line, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tm_slurm.config import load
from tm_slurm.examples.char_gpt_options import OptionsError, ParallelOptions, check, read_options

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("char_gpt*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_ships_can_run(path: Path) -> None:
    config = load(path)
    check(config.train.options, config.job.nodes * config.job.ranks_per_node)


@pytest.mark.parametrize(
    ("parallel", "ranks", "dp", "micro_batches"),
    [({}, 4, 4, 1), ({"pp": 2, "tp": 2}, 8, 2, 2), ({"shard": 2, "dp": 1}, 2, 1, 1)],
)
def test_what_is_left_open_follows_from_the_ranks(
    parallel: dict[str, int], ranks: int, dp: int, micro_batches: int
) -> None:
    layout = ParallelOptions(**parallel).of(ranks)
    assert (layout.dp, layout.micro_batches) == (dp, micro_batches)
    assert layout.dp * layout.shard * layout.tp * layout.pp == ranks
    assert layout.divides == bool(parallel)


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        (
            {"parallel": {"dp": 2, "tp": 2}},
            8,
            "train.options.parallel: dp 2 * shard 1 * tp 2 * pp 1 is 4, but the number of ranks",
        ),
        ({"parallel": {"tp": 2}}, 3, "train.options.parallel: dp 1 * shard 1 * tp 2 * pp 1 is 2, but"),
        ({"parallel": {"pp": 2}}, 1, "train.options.parallel: dp 1 * shard 1 * tp 1 * pp 2 is 2, but"),
        (
            {"parallel": {"shards": 2}},
            2,
            "train.options.parallel.shards: unknown option; did you mean shard?",
        ),
        ({"parallel": 2}, 2, "train.options.parallel: options by name were expected, found 2"),
        ({"parallel": {"tp": 0}}, 2, "train.options.parallel.tp: at least 1 was expected, found 0"),
        ({"parallel": {"tp": 2.0}}, 2, "train.options.parallel.tp: int was expected, found 2.0"),
        ({"parallel": {"tp": 3}}, 3, "train.options.parallel.tp: the 4 heads cannot be shared out evenly"),
        ({"parallel": {"pp": 3}}, 3, "train.options.parallel.pp: the 4 layers cannot be shared out evenly"),
        (
            {"parallel": {"pp": 2, "micro_batches": 3}},
            2,
            "train.options.parallel.micro_batches: the 8 sequences of a batch cannot be shared out evenly",
        ),
        (
            {"parallel": {"pp": 4, "micro_batches": 2}},
            4,
            "train.options.parallel.micro_batches: at least one for each of the 4 stages",
        ),
        (
            {"parallel": {"micro_batches": 2}},
            2,
            "train.options.parallel.micro_batches: 2 of them need a pipeline",
        ),
        ({"compile": "yes"}, 1, "train.options.compile: bool was expected, found 'yes'"),
        ({"dynamic_shapes": True}, 1, "train.options.dynamic_shapes: only with compile: true"),
    ],
)
def test_a_wrong_layout_is_one_line(given: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(OptionsError) as caught:
        check(given, ranks)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_without_a_layout_all_ranks_are_replicas() -> None:
    assert read_options({}).parallel == ParallelOptions()
