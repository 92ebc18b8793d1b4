"""Every collective, type, operator and kind of shape against gloo: integers equal, floats up to rounding.

Hypothesis picks the cases; three processes that live as long as the module run each on both backends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import Member, Process, gang
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

SIZE = 3
FLOATS = ["float64", "float32", "float16", "bfloat16"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "bool"]
COMPLEX = ["complex64", "complex128"]
ARITHMETIC = ["SUM", "PRODUCT", "MIN", "MAX"]
BITWISE = ["BAND", "BOR", "BXOR"]
SHAPES = ["empty", "scalar", "one", "odd", "rows", "frame", "frames", "transposed", "strided"]
REDUCING = ["all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
MOVING = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_uneven",
    "send_recv",
    "objects",
]


@dataclass(frozen=True)
class Case:
    collective: str
    dtype: str
    op: str
    shape: str
    root: int
    asynchronous: bool
    seed: int


def make(case: Case, rank: int, salt: int = 0) -> torch.Tensor:
    """The tensor that `rank` puts in, on the default device: the same whoever asks."""
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator("cpu").manual_seed(case.seed * 1000 + rank * 10 + salt)
    shape = {
        "empty": (0,),
        "scalar": (),
        "one": (1,),
        "odd": (7, 3),
        "rows": (6, 50),
        "frame": (5_000,),
        "frames": (300, 700),
        "transposed": (40, 30),
        "strided": (60, 50),
    }[case.shape]
    high = 3 if case.op == "PRODUCT" else 100
    tensor = torch.randint(0, high, shape, generator=generator, device="cpu")
    if dtype.is_floating_point or dtype.is_complex:
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        if case.op == "PRODUCT":
            tensor = tensor.abs() + 0.5
    tensor = (tensor % 2).to(dtype) if dtype == torch.bool else tensor.to(dtype)
    tensor = tensor.to(torch.get_default_device())
    if case.shape == "transposed":
        return tensor.t()
    if case.shape == "strided":
        return tensor[:, ::2]
    return tensor


def run(case: Case, rank: int, group: Any) -> list[torch.Tensor]:
    """Run the case and return every tensor that it may change."""
    op = getattr(ReduceOp, case.op)
    own = make(case, rank)
    like = torch.zeros_like(own)
    root = rank == case.root
    works: list[Any] = []
    options: dict[str, Any] = {"group": group, "async_op": case.asynchronous}
    flat = own.contiguous().reshape(-1)
    name = case.collective
    if name == "all_reduce":
        outputs = [own]
        works.append(dist.all_reduce(own, op, **options))
    elif name == "all_reduce_coalesced":
        outputs = [own, make(case, rank, 1), make(case, rank, 2)]
        works.append(dist.all_reduce_coalesced(outputs, op, **options))
    elif name == "reduce":
        outputs = [own] if root else []
        works.append(dist.reduce(own, case.root, op, **options))
    elif name == "reduce_scatter":
        outputs = [like]
        works.append(
            dist.reduce_scatter(like, [make(case, rank, salt) for salt in range(SIZE)], op, **options)
        )
    elif name == "reduce_scatter_tensor":
        outputs = [torch.zeros_like(flat)]
        works.append(dist.reduce_scatter_tensor(outputs[0], flat.repeat(SIZE), op, **options))
    elif name == "broadcast":
        outputs = [own]
        works.append(dist.broadcast(own, case.root, **options))
    elif name == "all_gather":
        outputs = [torch.zeros_like(own) for _ in range(SIZE)]
        works.append(dist.all_gather(outputs, own, **options))
    elif name == "all_gather_into_tensor":
        outputs = [torch.zeros(flat.numel() * SIZE, dtype=flat.dtype)]
        works.append(dist.all_gather_into_tensor(outputs[0], flat, **options))
    elif name == "gather":
        outputs = [torch.zeros_like(own) for _ in range(SIZE)] if root else []
        works.append(dist.gather(own, outputs if root else None, case.root, **options))
    elif name == "scatter":
        outputs = [like]
        inputs = [make(case, rank, salt) for salt in range(SIZE)] if root else None
        works.append(dist.scatter(like, inputs, case.root, **options))
    elif name == "all_to_all":
        outputs = [torch.zeros_like(own) for _ in range(SIZE)]
        works.append(dist.all_to_all(outputs, [make(case, rank, salt) for salt in range(SIZE)], **options))
    elif name == "all_to_all_single":
        outputs = [torch.zeros(flat.numel() * SIZE, dtype=flat.dtype)]
        works.append(dist.all_to_all_single(outputs[0], flat.repeat(SIZE), **options))
    elif name == "all_to_all_uneven":
        given_ = [(rank + other) % 4 for other in range(SIZE)]  # rows from rank to other; symmetric
        data = make(case, rank).contiguous().reshape(1, -1).expand(sum(given_), -1).contiguous()
        outputs = [torch.zeros_like(data)]
        works.append(dist.all_to_all_single(outputs[0], data, given_, given_, **options))
    elif name == "send_recv":
        outputs = [like]
        after, before = (rank + 1) % SIZE, (rank - 1) % SIZE
        works += [dist.isend(own, after, group, tag=3), dist.irecv(like, before, group, tag=3)]
    else:
        found: list[Any] = [None] * SIZE
        dist.all_gather_object(found, {"rank": rank, "tensor": own}, group=group)
        assert [one["rank"] for one in found] == list(range(SIZE))
        outputs = [one["tensor"] for one in found]
    for work in works:
        if work is not None:
            work.wait()
    return outputs


def expected(case: Case, rank: int) -> list[torch.Tensor]:
    """What should come out, computed by one process alone."""
    everyone = [make(case, other) for other in range(SIZE)]

    def folded(tensors: list[torch.Tensor]) -> torch.Tensor:
        total = tensors[0].clone()
        wide = total.to(torch.float64) if total.dtype.is_floating_point else total
        for tensor in tensors[1:]:
            other = tensor.to(wide.dtype)
            wide = {
                "SUM": lambda a=wide, b=other: a | b if a.dtype == torch.bool else a + b,
                "AVG": lambda a=wide, b=other: a + b,
                "PRODUCT": lambda a=wide, b=other: a * b,
                "MIN": lambda a=wide, b=other: torch.minimum(a, b),
                "MAX": lambda a=wide, b=other: torch.maximum(a, b),
                "BAND": lambda a=wide, b=other: a & b,
                "BOR": lambda a=wide, b=other: a | b,
                "BXOR": lambda a=wide, b=other: a ^ b,
            }[case.op]()
        return (wide / SIZE if case.op == "AVG" else wide).to(total.dtype)

    root = rank == case.root
    name = case.collective
    flat = [tensor.contiguous().reshape(-1) for tensor in everyone]
    rows = [(rank + other) % 4 for other in range(SIZE)]
    return {
        "all_reduce": lambda: [folded(everyone)],
        "all_reduce_coalesced": lambda: [
            folded([make(case, other, salt) for other in range(SIZE)]) for salt in range(3)
        ],
        "reduce": lambda: [folded(everyone)] if root else [],
        "reduce_scatter": lambda: [folded([make(case, other, rank) for other in range(SIZE)])],
        "reduce_scatter_tensor": lambda: [folded(flat)],
        "broadcast": lambda: [everyone[case.root]],
        "all_gather": lambda: everyone,
        "all_gather_into_tensor": lambda: [torch.cat(flat)],
        "gather": lambda: everyone if root else [],
        "scatter": lambda: [make(case, case.root, rank)],
        "all_to_all": lambda: [make(case, other, rank) for other in range(SIZE)],
        "all_to_all_single": lambda: [torch.cat(flat)],
        "all_to_all_uneven": lambda: [
            torch.cat([one.reshape(1, -1).expand(count, -1) for one, count in zip(flat, rows, strict=True)])
        ],
        "send_recv": lambda: [everyone[(rank - 1) % SIZE]],
        "objects": lambda: everyone,
    }[name]()


def close_enough(ours: torch.Tensor, theirs: torch.Tensor, case: Case) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if case.collective in MOVING or not (ours.dtype.is_floating_point or ours.dtype.is_complex):
        return torch.equal(ours, theirs)
    # Each of the SIZE - 1 roundings, and AVG's, is off by at most one ulp of the largest intermediate value.
    scale = 4.0 * SIZE if case.op in ("SUM", "AVG") else theirs.abs().max().item() if theirs.numel() else 0.0
    bound = 2 * SIZE * torch.finfo(ours.dtype).eps * max(scale, 1e-30)
    return bool(((ours - theirs).abs() <= bound).all())


def serve(me: Member, directory: str, device: str) -> None:
    torch.set_default_device(device)
    me.join_world()
    gloo = gloo_beside(me.rank, directory)
    for case in iter(me.hear, None):
        ours = run(case, me.rank, None)
        for found, wanted in zip(ours, expected(case, me.rank), strict=True):
            assert close_enough(found, wanted, case), (case, found, wanted)
        theirs = gloo_says(case, me.rank, gloo)
        if theirs is not None:
            for found, wanted in zip(ours, theirs, strict=True):
                assert close_enough(found, wanted, case), (case, found, wanted)
        me.tell("gloo" if theirs is not None else "alone")


def gloo_beside(rank: int, directory: str) -> Any:
    """A gloo group with a store of its own, made known to torch.distributed as if new_group had made it."""
    store = dist.FileStore(os.path.join(directory, "store"), SIZE)
    group = dist.ProcessGroup(store, rank, SIZE)
    backend = dist.ProcessGroupGloo(store, rank, SIZE, timedelta(seconds=20))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    known = dist.distributed_c10d._world
    known.pg_map[group] = ("gloo", None)
    known.pg_names[group] = "gloo-beside"
    known.pg_group_ranks[group] = {other: other for other in range(SIZE)}
    known.pg_backend_config[group] = "cpu:gloo"
    return group


def gloo_says(case: Case, rank: int, gloo: Any) -> list[torch.Tensor] | None:
    """None where gloo has no answer: all ranks see that alike."""
    no_gloo = (
        case.dtype in ("int16", "bool", *COMPLEX)
        or case.op in ("AVG", *BITWISE)
        or case.shape in ("empty", "scalar", "transposed", "strided")
        or torch.get_default_device().type != "cpu"
        or case.collective in ("all_to_all", "objects", "all_reduce_coalesced")
    )
    return None if no_gloo else run(case, rank, gloo)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def servers(request: pytest.FixtureRequest) -> Iterator[list[Process]]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with gang() as members, tempfile.TemporaryDirectory() as directory:
        yield members.world(serve, SIZE, directory, request.param)


def ops_for(dtype: str, collective: str) -> list[str]:
    if collective in MOVING:
        return ["SUM"]
    if dtype in COMPLEX:
        return ["SUM"]
    if dtype in FLOATS:
        return [*ARITHMETIC, "AVG"]
    return ["SUM", "MIN", "MAX", *BITWISE] if dtype == "bool" else [*ARITHMETIC, *BITWISE]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    collective = draw(st.sampled_from(REDUCING + MOVING))
    dtype = draw(st.sampled_from(FLOATS + INTEGERS + COMPLEX))
    return Case(
        collective=collective,
        dtype=dtype,
        op=draw(st.sampled_from(ops_for(dtype, collective))),
        shape=draw(st.sampled_from(SHAPES)),
        root=draw(st.integers(0, SIZE - 1)),
        asynchronous=draw(st.booleans()),
        seed=draw(st.integers(0, 10_000)),
    )


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_any_case(servers: list[Process], case: Case) -> None:
    for server in servers:
        server.tell(case)
    assert len({server.hear() for server in servers}) == 1


ask_gloo = {
    name for name in REDUCING + MOVING if name not in ("all_to_all", "objects", "all_reduce_coalesced")
}


@pytest.mark.parametrize("collective", REDUCING + MOVING)
def test_every_collective_in_float32(servers: list[Process], collective: str) -> None:
    for shape in SHAPES:
        case = Case(collective, "float32", "SUM", shape, 1, False, 7)
        for server in servers:
            server.tell(case)
        answers = {server.hear() for server in servers}
        if shape == "frames" and collective in ask_gloo and not torch.cuda.is_available():
            assert answers == {"gloo"}
