"""Each layout of the example, with each kind of rank replaced halfway by a standby that was warm for another
one: the same bits as undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import replacement
from char_gpt_layouts import joins_after_another_role, kind_of, size_of, trains
from gang import gang

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LONG = pytest.mark.layouts


@pytest.mark.parametrize(
    ("name", "leavers"),
    [
        ("char_gpt_shard2", [1]),
        ("char_gpt_tp2", [0]),
        ("char_gpt_pp2", [0]),
        ("char_gpt_pp2", [1]),
        pytest.param("char_gpt_dp2", [0], marks=LONG),
        pytest.param("char_gpt_shard2", [0], marks=LONG),
        pytest.param("char_gpt_tp2", [1], marks=LONG),
        pytest.param("char_gpt_dp2_shard2", [1], marks=LONG),
        pytest.param("char_gpt_pp2_shard2", [2], marks=LONG),
        pytest.param("char_gpt_dp2_pp4", [0, 5], marks=LONG),
        pytest.param("char_gpt_dp2_pp4", [2, 7], marks=LONG),
        pytest.param("char_gpt_dp2_tp2_pp2", [0, 3], marks=LONG),
    ],
)
def test_a_replacement_changes_no_bit(name: str, leavers: list[int]) -> None:
    kind, size = kind_of(name), size_of(name)
    found = replacement.replaced(kind, size, leavers, joins_after_another_role)
    assert found == replacement.reference(kind, size)


@pytest.mark.parametrize(
    "name",
    [
        "char_gpt_tp2",
        "char_gpt_pp2",
        *(
            pytest.param(f"char_gpt_{layout}", marks=LONG)
            for layout in ("shard2", "dp2_shard2", "pp2_shard2", "dp2_pp4", "dp2_tp2_pp2")
        ),
    ],
)
def test_the_loss_falls(name: str) -> None:
    with gang() as members:
        for one in members.world(trains, size_of(name), kind_of(name), 40):
            losses, _ = one.result(120.0)
            assert sum(losses[-5:]) < sum(losses[:5]) - 0.5


@pytest.mark.layouts
@pytest.mark.parametrize("name", ["char_gpt_compile", "char_gpt_compile_dynamic"])
def test_a_replacement_of_compiled_code_changes_no_bit(name: str, tmp_path: Path) -> None:
    """Both ranks compile at the same time; the standby finds what they have left in the cache."""
    kind = kind_of(name, str(tmp_path))
    found = replacement.replaced(kind, 2, [1], joins_after_another_role)
    assert found == replacement.reference(kind, 2)
