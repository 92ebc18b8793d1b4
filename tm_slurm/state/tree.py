"""The safe encoding: Python values as JSON, exactly, without pickle.

What JSON cannot say is an object with one key that begins with "$": `{"$tuple": [1, 2]}`. Floats come back
with the same bits (nan payloads and -0.0 as well), integers of any size, dictionaries with any encodable key
in the same order. Only values of exactly the listed types are encoded: a subclass may carry more than its
base shows, so it is refused. Decoding builds nothing larger than the text it is given.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from tm_slurm.state.dtypes import dtype_from_name, dtype_name
from tm_slurm.state.errors import StateError
from tm_slurm.state.tensors import local_parts, value_bytes

Json: TypeAlias = Any  # None, bool, int, float, str, list or dict of them: what json.dumps takes

TensorSink: TypeAlias = Callable[[str, torch.Tensor], int]
"""Takes a tensor found at a path and answers the number that stands for it in the tree."""

TensorSource: TypeAlias = Callable[[int], torch.Tensor]
"""Answers the tensor that a number stands for; raises IndexError or KeyError for a number nobody gave."""

MAX_DEPTH = 100
ARRAY_AS_TENSOR_BYTES = 4096  # a NumPy array of at least this size travels as a tensor where there is a sink

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
    "str": str,
}
_ARRAY_KINDS = "biufcSUMm"
_TENSOR_ARRAY_KINDS = "biufc"


def encode(value: Any, *, path: str = "state", tensors: TensorSink | None = None) -> Json:
    """`value` as JSON-safe data.

    A tensor goes to `tensors` and only its number stays in the tree; without a sink its bytes are in the
    tree. Raises StateError with the path of the first value that cannot be encoded safely.
    """
    return _encode(value, path, tensors, 0)


def decode(tree: Json, *, path: str = "state", tensors: TensorSource | None = None) -> Any:
    """The value that `encode` was given; StateError for whatever is wrong with a `tree` from elsewhere."""
    try:
        return _decode(tree, path, tensors, 0)
    except StateError:
        raise
    except (TypeError, ValueError, LookupError, OverflowError, RuntimeError, struct.error) as error:
        raise StateError(f"{path}: not a tree that encode() makes: {type(error).__name__}: {error}") from None


def _encode(value: Any, path: str, tensors: TensorSink | None, depth: int) -> Json:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < (1 << 63) else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if depth > MAX_DEPTH:
        raise StateError(f"{path}: nested more than {MAX_DEPTH} deep; does it contain itself?")
    if kind is list:
        return _encode_items(value, path, tensors, depth)
    if kind is dict:
        return _encode_dict(value, path, tensors, depth)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, tensors)
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, path, tensors, depth + 1)
    if isinstance(value, np.generic):
        return _encode_scalar(value, path)
    raise StateError(
        f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be encoded safely; let state_dict() "
        "return numbers, strings, "
        "bytes, tensors, NumPy arrays, or lists, tuples, sets and dictionaries of them"
    )


def _encode_items(value: Any, path: str, tensors: TensorSink | None, depth: int) -> list[Json]:
    return [_encode(item, f"{path}.{index}", tensors, depth + 1) for index, item in enumerate(value)]


def _child(path: str, key: object) -> str:
    if isinstance(key, str):
        return f"{path}.{key}"
    try:
        return f"{path}.{key!r:.60}"
    except (ValueError, TypeError):  # an integer of thousands of digits
        return f"{path}.({type(key).__name__})"


def _encode_pairs(value: Any, path: str, tensors: TensorSink | None, depth: int) -> list[Json]:
    return [
        [
            _encode(key, f"{path} (a key)", tensors, depth + 1),
            _encode(item, _child(path, key), tensors, depth + 1),
        ]
        for key, item in value.items()
    ]


def _encode_dict(value: dict[Any, Any], path: str, tensors: TensorSink | None, depth: int) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, _child(path, key), tensors, depth + 1) for key, item in value.items()}
    return {"$dict": _encode_pairs(value, path, tensors, depth)}


def _encode_set(value: Any, path: str, tensors: TensorSink | None, depth: int) -> Json:
    items = _encode_items(value, path, tensors, depth)
    return sorted(items, key=repr)  # the order of a set differs from process to process


def _encode_defaultdict(value: Any, path: str, tensors: TensorSink | None, depth: int) -> Json:
    for name, factory in _FACTORIES.items():
        if factory is value.default_factory:
            return {"$defaultdict": [name, _encode_pairs(value, path, tensors, depth)]}
    raise StateError(
        f"{path}: a defaultdict that makes its values with {value.default_factory!r} cannot be encoded "
        "safely; "
        f"use one of {', '.join(sorted(_FACTORIES))}, or a plain dict"
    )


def _encode_array(value: np.ndarray[Any, Any], path: str, tensors: TensorSink | None, _depth: int) -> Json:
    kind = value.dtype.kind
    if kind not in _ARRAY_KINDS or value.dtype.itemsize == 0:
        raise StateError(
            f"{path}: a NumPy array of {value.dtype} cannot be encoded safely; use one of numbers or strings"
        )
    if tensors is not None and value.nbytes >= ARRAY_AS_TENSOR_BYTES and kind in _TENSOR_ARRAY_KINDS:
        try:
            # A copy: torch takes neither read-only arrays nor negative strides, and the array may be a view.
            return {"$array": tensors(path, torch.from_numpy(np.array(value, order="C")))}
        except TypeError:
            pass  # a byte order or size that torch does not have: its bytes travel in the tree
    return {"$ndarray": [value.dtype.str, list(value.shape), _text(value.tobytes())]}


def _encode_scalar(value: np.generic, path: str) -> Json:
    if value.dtype.kind not in _ARRAY_KINDS or value.dtype.itemsize == 0:
        raise StateError(
            f"{path}: a NumPy scalar of {value.dtype} cannot be encoded safely; use a number or a string"
        )
    return {"$scalar": [value.dtype.str, _text(value.tobytes())]}


def _encode_tensor(value: torch.Tensor, path: str, tensors: TensorSink | None) -> Json:
    if tensors is not None:
        return {"$tensor": tensors(path, value)}
    for _, part, wrapper in local_parts(value, path):
        if wrapper:
            raise StateError(
                f"{path}: a {type(value).__name__} cannot be written in a tree; give its local tensor"
            )
        name = dtype_name(part.dtype, path)
        return {"$bits": [name, list(part.shape), _text(value_bytes(part))]}
    raise StateError(f"{path}: a {type(value).__name__} without tensors inside")


def _text(raw: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(raw).decode("ascii")


_ENCODERS: dict[type, Callable[[Any, str, TensorSink | None, int], Json]] = {
    tuple: lambda v, p, t, d: {"$tuple": _encode_items(v, p, t, d)},
    torch.Size: lambda v, p, t, d: {"$size": list(v)},
    OrderedDict: lambda v, p, t, d: {"$ordered": _encode_pairs(v, p, t, d)},
    Counter: lambda v, p, t, d: {"$counter": _encode_pairs(v, p, t, d)},
    defaultdict: _encode_defaultdict,
    set: lambda v, p, t, d: {"$set": _encode_set(v, p, t, d)},
    frozenset: lambda v, p, t, d: {"$frozenset": _encode_set(v, p, t, d)},
    deque: lambda v, p, t, d: {"$deque": [v.maxlen, _encode_items(v, p, t, d)]},
    bytes: lambda v, p, t, d: {"$bytes": _text(v)},
    bytearray: lambda v, p, t, d: {"$bytearray": _text(v)},
    complex: lambda v, p, t, d: {"$complex": struct.pack(">dd", v.real, v.imag).hex()},
    range: lambda v, p, t, d: {"$range": [_encode(part, p, t, d) for part in (v.start, v.stop, v.step)]},
    np.ndarray: _encode_array,
    np.str_: lambda v, p, t, d: {"$npstr": str(v)},
    np.bytes_: lambda v, p, t, d: {"$npbytes": _text(bytes(v))},
    torch.dtype: lambda v, p, t, d: {"$dtype": dtype_name(v, p)},
    torch.device: lambda v, p, t, d: {"$device": str(v)},
}


def _decode(tree: Json, path: str, tensors: TensorSource | None, depth: int) -> Any:
    if tree is None or isinstance(tree, str | bool | int | float):
        return tree
    if depth > 2 * MAX_DEPTH:
        raise StateError(f"{path}: nested more than {MAX_DEPTH} deep")
    if isinstance(tree, list):
        return [_decode(item, f"{path}.{index}", tensors, depth + 1) for index, item in enumerate(tree)]
    if not isinstance(tree, dict):
        raise StateError(f"{path}: a {type(tree).__name__} is not part of a tree")
    tag = next(iter(tree), "")
    if not (isinstance(tag, str) and tag.startswith("$")):
        return {key: _decode(item, _child(path, key), tensors, depth + 1) for key, item in tree.items()}
    decoder = _DECODERS.get(tag)
    if decoder is None or len(tree) != 1:
        raise StateError(f"{path}: unknown kind of value {tag!r}; is the sender a newer version?")
    return decoder(tree[tag], path, tensors, depth + 1)


def _list(value: Json, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise TypeError(f"a list{'' if length is None else f' of {length}'} was expected")
    return value


def _pairs(value: Json, path: str, tensors: TensorSource | None, depth: int) -> list[tuple[Any, Any]]:
    pairs = []
    for pair in _list(value):
        key = _decode(_list(pair, 2)[0], path, tensors, depth + 1)
        pairs.append((key, _decode(pair[1], _child(path, key), tensors, depth + 1)))
    return pairs


def _items(value: Json, path: str, tensors: TensorSource | None, depth: int) -> list[Any]:
    return [_decode(item, f"{path}.{index}", tensors, depth + 1) for index, item in enumerate(_list(value))]


def _string(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError("text was expected")
    return value


def _raw(value: Json) -> bytes:
    return base64.b64decode(_string(value), validate=True)


def _hex(value: Json) -> bytes:
    return bytes.fromhex(_string(value))


def _shape(value: Json) -> tuple[int, ...]:
    shape = tuple(_list(value))
    if len(shape) > 64 or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        raise ValueError(f"{value!r} is not a shape")
    return shape


def _array_dtype(value: Json) -> np.dtype[Any]:
    if not isinstance(value, str) or len(value) > 32:
        raise TypeError("the name of a NumPy dtype was expected")
    dtype = np.dtype(value)
    if dtype.kind not in _ARRAY_KINDS or dtype.itemsize == 0:
        raise ValueError(f"NumPy arrays of {value!r} do not travel")
    return dtype


def _decode_array(value: Json, _path: str, _tensors: TensorSource | None, _depth: int) -> Any:
    name, shape, text = _list(value, 3)
    return np.frombuffer(_raw(text), _array_dtype(name)).reshape(_shape(shape)).copy()


def _decode_scalar(value: Json, _path: str, _tensors: TensorSource | None, _depth: int) -> Any:
    name, text = _list(value, 2)
    (scalar,) = np.frombuffer(_raw(text), _array_dtype(name))
    return scalar


def _decode_bits(value: Json, path: str, _tensors: TensorSource | None, _depth: int) -> torch.Tensor:
    name, shape, text = _list(value, 3)
    dtype, raw = dtype_from_name(name, path), bytearray(_raw(text))
    if math.prod(_shape(shape)) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes are not a {name} tensor of shape {shape}")
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def _decode_tensor(value: Json, path: str, tensors: TensorSource | None, _depth: int) -> torch.Tensor:
    if tensors is None or type(value) is not int or value < 0:
        raise StateError(f"{path}: tensor number {value!r}, but no such tensor came with this tree")
    return tensors(value)


def _decode_defaultdict(value: Json, path: str, tensors: TensorSource | None, depth: int) -> Any:
    name, pairs = _list(value, 2)
    return defaultdict(_FACTORIES[name], _pairs(pairs, path, tensors, depth))


def _decode_deque(value: Json, path: str, tensors: TensorSource | None, depth: int) -> Any:
    maxlen, items = _list(value, 2)
    return deque(_items(items, path, tensors, depth), maxlen)


def _decode_counter(value: Json, path: str, tensors: TensorSource | None, depth: int) -> Any:
    return Counter(dict(_pairs(value, path, tensors, depth)))


def _decode_range(value: Json, path: str, tensors: TensorSource | None, depth: int) -> Any:
    return range(*_items(_list(value, 3), path, tensors, depth))


_DECODERS: dict[str, Callable[[Json, str, TensorSource | None, int], Any]] = {
    "$int": lambda v, p, t, d: int(v, 16),
    "$float": lambda v, p, t, d: struct.unpack(">d", _hex(v))[0],
    "$complex": lambda v, p, t, d: complex(*struct.unpack(">dd", _hex(v))),
    "$tuple": lambda v, p, t, d: tuple(_items(v, p, t, d)),
    "$size": lambda v, p, t, d: torch.Size(_shape(v)),
    "$dict": lambda v, p, t, d: dict(_pairs(v, p, t, d)),
    "$ordered": lambda v, p, t, d: OrderedDict(_pairs(v, p, t, d)),
    "$counter": _decode_counter,
    "$defaultdict": _decode_defaultdict,
    "$set": lambda v, p, t, d: set(_items(v, p, t, d)),
    "$frozenset": lambda v, p, t, d: frozenset(_items(v, p, t, d)),
    "$deque": _decode_deque,
    "$bytes": lambda v, p, t, d: _raw(v),
    "$bytearray": lambda v, p, t, d: bytearray(_raw(v)),
    "$range": _decode_range,
    "$ndarray": _decode_array,
    "$scalar": _decode_scalar,
    "$npstr": lambda v, p, t, d: np.str_(_string(v)),
    "$npbytes": lambda v, p, t, d: np.bytes_(_raw(v)),
    "$bits": _decode_bits,
    "$tensor": _decode_tensor,
    "$array": lambda v, p, t, d: _decode_tensor(v, p, t, d).detach().cpu().numpy().copy(),
    "$dtype": lambda v, p, t, d: dtype_from_name(v, p),
    "$device": lambda v, p, t, d: torch.device(v),
}
