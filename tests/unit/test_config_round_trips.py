"""A configuration is read by the rules of YAML 1.2, overridden, written out, and read back equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tm_slurm.config import (
    CommConfig,
    Config,
    JobConfig,
    PolicyConfig,
    TrainConfig,
    dump,
    load,
    loads,
    minutes_of,
    parse_override,
)
from tm_slurm.config.reference import markdown

ROOT = Path(__file__).parents[2]
TRAIN = "train: {module: train}\n"

_line = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20).filter(
    str.isprintable
)
_any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_options = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _any_text,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(_any_text, inside, max_size=3),
    max_leaves=10,
)
_configs = st.builds(
    Config,
    job=st.builds(
        JobConfig,
        name=_line,
        nodes=st.integers(1, 10**6),
        standbys=st.integers(0, 100),
        partition=st.none() | _line,
        time_limit=st.none()
        | st.integers(1, 10**6)
        | st.sampled_from(["1:30:00", "1-12", "UNLIMITED", "90"]),
        memory=st.none() | st.integers(0, 10**6) | st.sampled_from(["16G", "500M", "16"]),
        directory=_line,
        python=st.none() | _line,
        setup=st.lists(_line, max_size=2),
        sbatch=st.dictionaries(
            st.sampled_from(["mail-user", "exclusive"]), _line | st.booleans() | st.integers()
        ),
    ),
    train=st.builds(
        TrainConfig,
        module=st.just("package.train"),
        args=st.lists(_any_text, max_size=3),
        steps=st.none() | st.integers(min_value=1),
        options=st.dictionaries(_any_text, _options, max_size=4),
    ),
    policy=st.builds(PolicyConfig, lease_s=st.floats(0.001, 1e6), release=st.booleans()),
    comm=st.builds(CommConfig, timeout_s=st.floats(0.001, 1e9)),
)


@given(_configs)
def test_what_is_written_is_read_back_equal(config: Config) -> None:
    text = dump(config)
    assert loads(text, name="x") == config
    assert loads(text.encode(), name="x") == config


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3e-4", 3e-4),
        ("1e5", 1e5),
        (".5", 0.5),
        ("010", 10),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("1:30:00", "1:30:00"),
        ("2020-01-01", "2020-01-01"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("~", None),
        ("True", True),
        ("'3'", "3"),
    ],
)
def test_scalars_are_what_they_look_like(written: str, value: Any) -> None:
    config = loads(f"train: {{module: t, options: {{x: {written}}}}}", name="x")
    assert config.train.options["x"] == value
    assert type(config.train.options["x"]) is type(value)


def test_whole_numbers_are_numbers() -> None:
    config = loads(TRAIN + "policy: {lease_s: 4}", name="x")
    assert config.policy.lease_s == 4.0 and type(config.policy.lease_s) is float


def test_an_empty_section_is_its_defaults() -> None:
    assert loads(TRAIN + "job:\npolicy:\n", name="x") == loads(TRAIN, name="x")


def test_the_command_line_holds_over_the_file() -> None:
    text = "job: {nodes: 2}\ntrain: {module: t, steps: 5, options: {model: {layers: 2, width: 8}}}\n"
    config = loads(
        text,
        name="x",
        overrides={
            "job.nodes": 4,
            "train.options.model.layers": 9,
            "train.options.seed": 1,
            "comm.timeout_s": 5,
        },
    )
    assert (config.job.nodes, config.train.steps, config.comm.timeout_s) == (4, 5, 5.0)
    assert config.train.options == {"model": {"layers": 9, "width": 8}, "seed": 1}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.steps=50", "train.steps", 50),
        ("train.options.lr=3e-4", "train.options.lr", 3e-4),
        ("job.partition=gpu", "job.partition", "gpu"),
        ("job.partition=", "job.partition", None),
        ("train.args=[--a, b=c]", "train.args", ["--a", "b=c"]),
        ("train.options.data={paths: [x]}", "train.options.data", {"paths": ["x"]}),
        ("job.time_limit=1:00:00", "job.time_limit", "1:00:00"),
    ],
)
def test_an_override_is_one_value_of_yaml(text: str, key: str, value: Any) -> None:
    assert parse_override(text) == (key, value)


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [
        (30, 30),
        ("30", 30),
        ("90:00", 90),
        ("90:30", 91),
        ("12:00:00", 720),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("1-12:30:00", 2190),
        ("UNLIMITED", None),
        ("infinite", None),
        (None, None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(limit: str | int | None, minutes: int | None) -> None:
    assert minutes_of(limit) == minutes


def test_the_example_asks_for_what_its_template_asks_for() -> None:
    job = load(ROOT / "configs" / "char_gpt.yaml").job
    template = (ROOT / "sbatch_templates" / "train.sbatch").read_text()
    assert f"#SBATCH --nodes={job.all_nodes}\n" in template
    assert f"#SBATCH --cpus-per-task={job.ranks_per_node * job.cpus_per_rank}\n" in template
    assert f"#SBATCH --time={job.time_limit}\n" in template
    assert f"#SBATCH --signal=USR2@{job.signal_delay_s}\n" in template
    assert f"#SBATCH --job-name={job.name}\n" in template


def test_the_reference_is_the_one_that_the_code_writes() -> None:
    """Else: python -m tm_slurm.config.reference > configs/README.md"""
    assert (ROOT / "configs" / "README.md").read_text() == markdown()


def test_a_configuration_cannot_be_changed_or_made_by_position() -> None:
    config = loads(TRAIN, name="x")
    with pytest.raises(AttributeError):
        config.job.nodes = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        JobConfig("name")  # type: ignore[misc]
