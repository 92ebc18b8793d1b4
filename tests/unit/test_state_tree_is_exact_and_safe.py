"""The safe encoding gives back every value bit for bit, through JSON text; only values ever come out."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from state_examples import same

from tm_slurm.state import StateError
from tm_slurm.state.tree import _DECODERS, decode, encode

any_float = st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack("d", raw)[0]) | st.floats()
any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates too
array_dtypes = st.one_of(
    npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(endianness="?"),
    npst.boolean_dtypes(),
    npst.byte_string_dtypes(min_len=1, max_len=5),
    npst.unicode_string_dtypes(endianness="?", min_len=1, max_len=5),
    npst.datetime64_dtypes(endianness="?"),
)
arrays = npst.arrays(array_dtypes, npst.array_shapes(min_dims=0, min_side=0, max_side=4))
hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | any_text | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
leaves = st.one_of(
    hashable,
    any_float,
    st.builds(complex, any_float, any_float),
    st.binary().map(bytearray),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.bool, torch.device("cpu"), torch.device("cuda", 3)]
    ),
    st.lists(st.integers(0, 9), max_size=4).map(torch.Size),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 5)),
    arrays,
    npst.arrays(array_dtypes, 1).map(lambda array: array[0]),
    st.integers(0, 5).map(lambda size: torch.arange(size, dtype=torch.bfloat16)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(any_text, inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4).map(OrderedDict),
        st.dictionaries(hashable, st.integers(), max_size=4).map(Counter),
        st.dictionaries(hashable, inner, max_size=4).map(lambda items: defaultdict(list, items)),
        st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=5)),
        st.sets(hashable, max_size=4),
    ),
    max_leaves=12,
)


def through_text(value: object) -> object:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@given(values)
@settings(max_examples=300, deadline=None)
def test_every_value_comes_back_bit_for_bit(value: object) -> None:
    assert same(through_text(value), value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        struct.unpack("d", struct.pack("Q", 0x7FF8DEADBEEF0001))[0],
        -0.0,
        math.inf,
        2**20000,
        -(2**63) - 1,
        {1: "a", "1": "b", (1, "x"): None},
        {"$tuple": [1]},
        {"": {"$": 1}},
        {True: 1, None: 2},
        np.float64("nan"),
        np.array([], dtype=np.float32).reshape(0, 3),
        torch.zeros(0, 4, dtype=torch.complex64),
        torch.tensor(-0.0),
        defaultdict(None, {1: 2}),
        deque([1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_awkward_values_come_back(value: object) -> None:
    assert same(through_text(value), value)


class Money(int):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Money(3),
        namedtuple("Point", "x y")(1, 2),
        lambda: None,
        np.array([object()]),
        np.zeros(2, dtype=[("a", int)]),
        defaultdict(lambda: 3),
        torch.ones(2).to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_encoded_exactly_is_refused_with_its_path(value: object) -> None:
    with pytest.raises(StateError, match=r"data\.epochs\.1"):
        encode({"epochs": [0, value]}, path="data")


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append((endless,))
    with pytest.raises(StateError, match="contain itself"):
        encode(endless)


tags = st.sampled_from([*_DECODERS, "$unknown", "$"])
json_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["<f8", "|O", "V8", "float32", "AAAAAAAAAAA=", "0x1", "none", "cpu"]),
)
hostile_trees = st.recursive(
    json_leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.tuples(tags, inner).map(lambda pair: {pair[0]: pair[1]})
    ),
    max_leaves=10,
)


@given(hostile_trees)
@settings(max_examples=500, deadline=None)
def test_a_hostile_tree_gives_a_value_or_a_state_error(tree: object) -> None:
    with contextlib.suppress(StateError):
        decode(tree, tensors=[torch.ones(2)].__getitem__)


@pytest.mark.parametrize(
    "tree",
    [
        {"$ndarray": ["<f8", [1 << 40], "AAAAAAAAAAA="]},
        {"$ndarray": ["|O", [1], "AAAAAAAAAAA="]},
        {"$bits": ["float32", [1 << 46], ""]},
        {"$bits": ["float32", [-1], ""]},
        {"$tensor": -1},
        {"$tensor": 5},
        {"$tensor": True},
        {"$pickle": "gASVCg=="},
        {"$tuple": [1], "$list": [2]},
        {"$int": "0x" + "f" * 10 + "z"},
        {"$dict": [[[1], 2]]},
        {"$device": "no such thing"},
    ],
    ids=str,
)
def test_a_tree_that_nobody_encoded_is_refused(tree: object) -> None:
    with pytest.raises(StateError):
        decode(tree, tensors=[torch.ones(2)].__getitem__)


def test_deep_nesting_is_refused_not_a_crash() -> None:
    tree: object = 1
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(StateError):
        decode(tree)
