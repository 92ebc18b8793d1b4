"""What is inside a tensor: its local part, and its memory as plain bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tm_slurm.state.errors import StateError

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def local_parts(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor, str]]:
    """The plain tensors that this process holds of `tensor`, each with its name and the class that wraps it
    ("" for none).

    A DTensor (FSDP2, tensor parallel) has one: the local shard. Other wrapper subclasses may have several.
    """
    if type(tensor) in _PLAIN:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise StateError(
                f"{name}: a {tensor.layout} tensor on {tensor.device} has no plain bytes to move; keep "
                "dense tensors in the state"
            )
        yield name, tensor, ""
        return
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):  # a DTensor; asked this way because importing its class takes long
        for part_name, part, _ in local_parts(local, name):
            yield part_name, part, "dtensor"
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for attribute in flatten()[0]:
            for part_name, part, _ in local_parts(getattr(tensor, attribute), f"{name}.{attribute}"):
                yield part_name, part, type(tensor).__qualname__
        return
    if torch.nn.parameter.is_lazy(tensor):
        raise StateError(f"{name}: not initialised yet; run one forward pass in build()")
    yield name, tensor.as_subclass(torch.Tensor), ""


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if the elements fill one span of memory without gaps or overlap, in any order of dimensions."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def lies_as(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """True if the elements of `tensor` are in memory in the order that `stride` gives for its shape."""
    return tensor.numel() < 2 or all(
        size == 1 or mine == step
        for size, mine, step in zip(tensor.shape, tensor.stride(), stride, strict=True)
    )


def is_direct(tensor: torch.Tensor) -> bool:
    """True if the bytes of `tensor` can be sent from, and received into, where they are."""
    return (
        tensor.device.type == "cpu"
        and not tensor.is_conj()
        and not tensor.is_neg()
        and is_dense(tensor.shape, tensor.stride())
    )


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a direct tensor, in storage order. The view keeps the storage alive."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def value_bytes(tensor: torch.Tensor) -> memoryview:
    """The bits of all elements in row-major order: in place if they lie so, else of a copy."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return byte_view(tensor)


def same_memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors exactly if they are the same elements of the same memory."""
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())


def write_in_place(name: str, tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Copies `source` into the memory of `tensor`, also where expand() made many elements of one.

    Raises StateError if the memory cannot hold what `source` says.
    """
    target = _narrowed_for_writing(tensor)
    part = source
    for dimension, size in enumerate(target.shape):
        part = part.narrow(dimension, 0, size)
    try:
        target.copy_(part)
    except RuntimeError as error:
        raise StateError(
            f"{name}: cannot be written in place here ({error}); keep it as a plain tensor"
        ) from error
    if target.shape != tensor.shape and bytes(value_bytes(tensor)) != bytes(value_bytes(source)):
        raise StateError(f"{name}: expanded here, so its elements are one, but different ones at the sender")


def _narrowed_for_writing(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without the copies that expand() makes: every element of it may be written."""
    for dimension, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def shard_of(whole: torch.Tensor) -> list[Any] | None:
    """Which part of the whole tensor a DTensor holds here, JSON-safe; None for any other tensor.

    Its global shape and, per dimension of the mesh that it is not replicated over: placement, coordinate,
    size."""
    mesh, placements = getattr(whole, "device_mesh", None), getattr(whole, "placements", None)
    if mesh is None or placements is None:
        return None
    coordinates = mesh.get_coordinate() or [-1] * mesh.ndim
    parts = [
        [str(placement), coordinate, mesh.size(dimension)]
        for dimension, (placement, coordinate) in enumerate(zip(placements, coordinates, strict=True))
        if not placement.is_replicate()
    ]
    return [list(whole.shape), parts]
