"""Host lists are expanded as Slurm expands them, without Slurm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tm_slurm.slurm import HostlistError, expand

CASES = [
    ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
    ("n1", ["n1"]),
    ("n1,n2,n1", ["n1", "n2", "n1"]),
    ("n[09-11]", ["n09", "n10", "n11"]),
    ("n[001,02]", ["n001", "n02"]),
    ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
    ("rack[1-2]-n[1-2],login", ["rack1-n1", "rack1-n2", "rack2-n1", "rack2-n2", "login"]),
    ("gpu[08-10]-ib", ["gpu08-ib", "gpu09-ib", "gpu10-ib"]),
    ("n[1-3,7],gpu[01-02]-ib", ["n1", "n2", "n3", "n7", "gpu01-ib", "gpu02-ib"]),
    ("n[1-2],", ["n1", "n2"]),
    ("a,,b", ["a", "b"]),
    (" a, b", ["a", "b"]),
    ("n1-3", ["n1-3"]),
    ("", []),
    ("(null)", []),
]


@pytest.mark.parametrize(("text", "names"), CASES)
def test_a_host_list_stands_for_its_names(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["n[3-1]", "n[]", "n[a-b]", "n[1:3]", "n[1--2]", "n[1-3", "n]", "n[1-100000]", "n[[1]]", "n[1,]"]
)
def test_what_is_no_host_list_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(HostlistError) as error:
        expand(text)
    assert repr(text) in str(error.value) and "\n" not in str(error.value)


def test_a_list_that_multiplies_without_end_is_refused_before_it_fills_memory() -> None:
    with pytest.raises(HostlistError, match="more than"):
        expand("n[1-60000][1-60000][1-60000]")


_numbers = st.one_of(
    st.integers(0, 12).map(str),
    st.tuples(st.integers(0, 12), st.integers(0, 9), st.sampled_from(["", "0", "00"])).map(
        lambda t: f"{t[2]}{t[0]}-{t[0] + t[1]}"
    ),
)
_brackets = st.lists(_numbers, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
_word = st.text("abn-", min_size=1, max_size=3).filter(lambda word: not word.startswith("-"))
_expression = st.one_of(
    _word,
    st.tuples(_word, _brackets).map("".join),
    st.tuples(_word, _brackets, _word, _brackets).map("".join),
)


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`scontrol show hostnames` asks no daemon, but wants a configuration."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed")
    conf = tmp_path_factory.mktemp("conf") / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=x\nPartitionName=p Nodes=x\n")
    return conf


@given(st.lists(_expression, min_size=1, max_size=3).map(",".join))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slurm_expands_the_same(slurm_conf: Path, text: str) -> None:
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        capture_output=True,
        check=True,
        env={"SLURM_CONF": str(slurm_conf), "PATH": "/usr/bin:/bin:/usr/local/bin"},
        text=True,
        timeout=10,
    )
    assert expand(text) == done.stdout.split()
