"""A mistake in a configuration is one line with file, line, and what would be right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tm_slurm.config import ConfigError, load, loads, parse_override

TRAIN = "train: {module: train}\n"


def mistake(text: str | bytes, overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        loads(text, name="job.yaml", overrides=overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # names
        ("job:\n  nodez: 3\n", "job.yaml:2: unknown key job.nodez; did you mean job.nodes?"),
        ("job:\n  node: 3\n", "job.yaml:2: unknown key job.node; did you mean job.nodes?"),
        ("\njobs: {}\n", "job.yaml:2: unknown section 'jobs'; did you mean job?"),
        ("nodes: 3\n", "job.yaml:1: unknown section 'nodes'; did you mean job.nodes?"),
        ("train:\n  nodes: 3\n", "job.yaml:2: unknown key train.nodes; did you mean job.nodes?"),
        ("job: {policy: {}}\n", "job.yaml:1: unknown key job.policy; did you mean the section policy?"),
        (
            "policy:\n  on_nonfinite: reddo\n",
            "job.yaml:2: policy.on_nonfinite: expected one of ignore, redo, stop, found 'reddo'; "
            "did you mean redo?",
        ),
        (
            "policy:\n  on_no_standby: [reque]\n",
            "job.yaml:2: policy.on_no_standby: expected some of wait, double-up, shrink, requeue, fail, "
            "found 'reque'",
        ),
        # given twice
        ("job:\n  nodes: 2\n  nodes: 3\n", "job.yaml:3: 'nodes' is given twice; the first is on line 2"),
        (
            "train:\n  options:\n    a: 1\n    a: 2\n",
            "job.yaml:4: 'a' is given twice; the first is on line 3",
        ),
        # types
        ("job:\n  nodes: true\n", "job.yaml:2: job.nodes: expected a whole number, found true"),
        ("job:\n  nodes: 2.0\n", "job.yaml:2: job.nodes: expected a whole number, found the number 2.0"),
        ("job:\n  nodes: four\n", "job.yaml:2: job.nodes: expected a whole number, found the text 'four'"),
        ("job:\n  nodes:\n", "job.yaml:2: job.nodes: expected a whole number, found nothing"),
        ("job:\n  nodes: [4]\n", "job.yaml:2: job.nodes: expected a whole number, found a list"),
        (
            "job:\n  partition: 12\n",
            "job.yaml:2: job.partition: expected text or nothing, found the number 12; put it in quotes",
        ),
        ("policy:\n  release: 1\n", "job.yaml:2: policy.release: expected true or false, found the number 1"),
        (
            "policy:\n  release: yes\n",
            "job.yaml:2: policy.release: expected true or false, found the text 'yes'",
        ),
        ("policy:\n  lease_s: true\n", "job.yaml:2: policy.lease_s: expected a number, found true"),
        ("policy:\n  lease_s: .inf\n", "job.yaml:2: policy.lease_s: expected a finite number, found inf"),
        ("policy:\n  lease_s: .nan\n", "job.yaml:2: policy.lease_s: expected a finite number, found nan"),
        ("train:\n  args: -v\n", "job.yaml:2: train.args: expected a list, found the text '-v'"),
        (
            "train:\n  args: [--depth, 3]\n",
            "job.yaml:2: train.args[1]: expected text, found the number 3; put it in quotes",
        ),
        (
            "train:\n  options:\n",
            "job.yaml:2: train.options: expected keys below it, found nothing; "
            "leave the key out, or write [] or {}",
        ),
        ("job: 4\n", "job.yaml:1: job: expected keys below it, found the number 4"),
        ("- job\n", "job.yaml:1: expected sections such as 'job:', found a list"),
        ("train:\n  options: {3: 4}\n", "job.yaml:2: expected text as a key, found '3'; put it in quotes"),
        # impossible numbers
        (TRAIN + "job:\n  nodes: 0\n", "job.yaml:3: job.nodes: expected at least 1, found 0"),
        (TRAIN + "job:\n  standbys: -1\n", "job.yaml:3: job.standbys: expected at least 0, found -1"),
        (
            TRAIN + "job:\n  ranks_per_node: 0\n",
            "job.yaml:3: job.ranks_per_node: expected at least 1, found 0",
        ),
        (
            TRAIN + "job:\n  gpus_per_rank: -1\n",
            "job.yaml:3: job.gpus_per_rank: expected at least 0, found -1",
        ),
        (
            TRAIN + "job:\n  ranks_per_node: 2\n  nodes: 4\n  ranks: 7\n",
            "job.yaml:5: job.ranks: 7 ranks cannot be divided into nodes of ranks_per_node: 2",
        ),
        (
            TRAIN + "job:\n  ranks_per_node: 2\n  nodes: 3\n  ranks: 8\n",
            "job.yaml:5: job.ranks: 8 ranks with ranks_per_node: 2 need nodes: 4, found nodes: 3",
        ),
        (
            TRAIN + "policy:\n  poll_interval_s: 0\n",
            "job.yaml:3: policy.poll_interval_s: expected more than 0 seconds, found 0",
        ),
        (
            TRAIN + "policy:\n  metrics_port: 70000\n",
            "job.yaml:3: policy.metrics_port: expected a port (0 to 65535), found 70000",
        ),
        (
            TRAIN + "policy:\n  heartbeat_s: 3\n",
            "job.yaml:3: policy.heartbeat_s: expected less than keepalive_s (2): an agent would be taken for "
            "dead between two reports; found 3",
        ),
        (
            TRAIN + "comm: {timeout_s: -1}\n",
            "job.yaml:2: comm.timeout_s: expected more than 0 seconds, found -1",
        ),
        ("train:\n  module: t\n  steps: 0\n", "job.yaml:3: train.steps: expected at least 1, found 0"),
        (
            TRAIN + "job:\n  time_limit: 1h\n",
            "job.yaml:3: job.time_limit: expected minutes or a time such as 90:00, 12:00:00, 1-12 or "
            "1-12:00:00, found '1h'",
        ),
        (
            TRAIN + "job:\n  time_limit: 0\n",
            "job.yaml:3: job.time_limit: expected more than 0 minutes, found 0 (UNLIMITED asks for no limit)",
        ),
        (
            TRAIN + "job:\n  memory: lots\n",
            "job.yaml:3: job.memory: expected a size such as 16G or 500M, found 'lots'",
        ),
        # what to run
        ("", "job.yaml:1: train.module: expected 'module' or 'script', found neither: what is to be run?"),
        (
            "job: {}\ntrain:\n  args: []\n",
            "job.yaml:2: train.module: expected 'module' or 'script', found neither: what is to be run?",
        ),
        (
            "train:\n  module: t\n  script: t.py\n",
            "job.yaml:3: train.script: expected 'module' or 'script', found both",
        ),
        (
            "train:\n  module: train.py; rm x\n",
            "job.yaml:2: train.module: expected a module name such as package.train, found 'train.py; rm x'",
        ),
        # what would break a batch script
        (
            TRAIN + 'job:\n  name: "a\\nb"\n',
            "job.yaml:3: job.name: expected one line of printable text, found 'a\\nb'",
        ),
        (
            TRAIN + "job:\n  sbatch: {nodes: 3}\n",
            "job.yaml:3: job.sbatch: 'nodes' cannot be set here: use job.nodes",
        ),
        (
            TRAIN + "job:\n  sbatch: {tm-policy: wait}\n",
            "job.yaml:3: job.sbatch: 'tm-policy' cannot be set here: use policy.on_no_standby",
        ),
        (
            TRAIN + "job:\n  sbatch: {batch: svc}\n",
            "job.yaml:3: job.sbatch: 'batch' cannot be set here: use job.batch_feature",
        ),
        (
            TRAIN + "job: {nodes: 5, standbys: 1, constraint: gpu, batch_feature: svc}\n",
            "job.yaml:2: job.constraint: expected one that names batch_feature svc, such as [gpu*5&svc*1], "
            "found 'gpu'",
        ),
        (
            TRAIN + "job: {batch_feature: 'a|b'}\n",
            "job.yaml:2: job.batch_feature: expected the name of one node feature, found 'a|b'",
        ),
        (
            TRAIN + "policy: {batch_host_drain: leave}\n",
            "job.yaml:2: policy.batch_host_drain: expected one of keep, requeue, found 'leave'; "
            "known are keep, requeue",
        ),
        (
            TRAIN + "job:\n  sbatch: {no-kill: false}\n",
            "job.yaml:3: job.sbatch: 'no-kill' cannot be set here: the job needs its own",
        ),
        (
            TRAIN + "job:\n  sbatch: {--mail-user: me}\n",
            "job.yaml:3: job.sbatch: expected a long option such as mail-user, found '--mail-user'",
        ),
        # broken YAML
        (
            "job: {nodes: 3\n",
            "job.yaml:2: while parsing a flow mapping expected ',' or '}', but got '<stream end>'",
        ),
        ("a: b: c\n", "job.yaml:1: mapping values are not allowed here"),
        (
            "job:\n\tnodes: 3\n",
            "job.yaml:2: while scanning for the next token found character '\\t' that cannot start any token",
        ),
        (
            "job:\n  name: \x01\n",
            "job.yaml:2: a character that YAML does not allow (special characters are not allowed)",
        ),
        (b"job:\n  name: \xff\n", "job.yaml:2: a character that YAML does not allow (invalid start byte)"),
        (
            TRAIN + "--- {}\n",
            "job.yaml:2: expected a single document in the stream but found another document",
        ),
        ("train: &a\n  options: *a\n", "job.yaml:1: a value must not contain itself"),
        (
            "base: &b {nodes: 3}\njob:\n  <<: *b\n",
            "job.yaml:3: '<<' is not supported: write the keys out",
        ),
        (
            "train:\n  options: !!python/object/apply:os.getcwd []\n",
            "job.yaml:2: the tag 'tag:yaml.org,2002:python/object/apply:os.getcwd' is not supported",
        ),
    ],
)
def test_a_mistake_is_one_line(text: str | bytes, message: str) -> None:
    assert mistake(text) == message


def test_a_mistake_in_an_override_names_the_option() -> None:
    assert (
        mistake(TRAIN, {"job.nodez": 3}) == "--set job.nodez: unknown key job.nodez; did you mean job.nodes?"
    )
    assert mistake(TRAIN, {"job.nodes": 0}) == "--set job.nodes: job.nodes: expected at least 1, found 0"
    assert mistake(TRAIN, {"job.nodes": True}).startswith(
        "--set job.nodes: job.nodes: expected a whole number"
    )
    assert mistake(TRAIN, {"train.module.x": 1}) == (
        "--set train.module.x: train.module holds the text 'train' at job.yaml:1, which has no keys"
    )


@pytest.mark.parametrize("text", ["train.steps", "=3", "", "a: b=3: ["])
def test_what_is_no_override_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        key, value = parse_override(text)
        loads(TRAIN, name="job.yaml", overrides={key: value})
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "no such.yaml"
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value) == f"{path}: cannot be read: No such file or directory"


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_must_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(TRAIN)
    path.chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        load(path)


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    with path.open("wb") as stream:
        stream.truncate(1 << 34)
    with pytest.raises(ConfigError, match="is this a configuration"):
        load(path)


def test_values_nested_without_end_are_refused() -> None:
    assert "nested" in mistake("train:\n  options: " + "[" * 1200 + "]" * 1200)
