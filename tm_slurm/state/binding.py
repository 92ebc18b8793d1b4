"""Where each tensor of the sender's layout goes on this rank: live storage where there is one that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tm_slurm.state.capturing import NamedTensor, Snapshot, capture
from tm_slurm.state.entries import MODULE, OPTIMIZER, inner_optimizer, state_entries
from tm_slurm.state.errors import StateError
from tm_slurm.state.layout import Layout, Piece
from tm_slurm.state.tensors import same_memory_key

SAME = (
    "build() must make the same model whenever it is called: let it depend on its role alone, on nothing "
    "global"
)


@dataclass
class Binding:
    """The receiving side of a layout, position by position."""

    locals: list[torch.Tensor]  # what the bytes go into
    wholes: list[torch.Tensor]  # what the tree's numbers stand for: the locals, or DTensors around them
    copies: list[tuple[int, torch.Tensor]]  # tied at the sender, not here: also written, afterwards
    allocated_bytes: int
    own: Snapshot = field(repr=False)

    def still_holds(self, own: Snapshot) -> bool:
        """True if `own`, captured now, has the same tensors in the same memory as when this was bound."""
        return same_tensors(self.own, own)


def same_tensors(before: Snapshot, now: Snapshot) -> bool:
    """True if two captures of one state named the same tensors in the same memory."""
    if (
        len(before.tensors) != len(now.tensors)
        or len(before.aliases) != len(now.aliases)
        or before.kinds != now.kinds
    ):
        return False
    return all(
        a.local is b.local and a.address == b.address and a.name == b.name
        for (a, _), (b, _) in zip(before.all_tensors(), now.all_tensors(), strict=True)
    )


@torch.no_grad()
def bind(layout: Layout, state: Mapping[str, Any], *, max_bytes: int | None = None) -> Binding:
    """Finds or allocates a tensor for every piece of `layout`.

    Module tensors must be there with the sender's shape and dtype. Optimizer state that this rank has not, or
    has in another shape, and the tensors of other objects are allocated: at most `max_bytes` of them, counted
    before the first is (by default 8 times the bytes that this rank's state has, and 64 MiB). Raises
    StateError; nothing is changed then.
    """
    own = capture(state, 0, generators=False)
    _check_entries(layout, own)
    live = {named.name: named for named, _ in own.all_tensors()}
    _check_modules(layout, live)
    found = [_live_target(piece, live) for piece in layout.pieces]
    allocated = sum(
        piece.nbytes for piece, target in zip(layout.pieces, found, strict=True) if target is None
    )
    limit = 8 * own.nbytes + (64 << 20) if max_bytes is None else max_bytes
    if allocated > limit:
        raise StateError(
            f"the sender's state needs {allocated} bytes that this rank has no tensors for, at most "
            f"{limit} are allowed; "
            "raise max_bytes if that is right"
        )
    _check_ties(layout, found)
    parameters = _parameters(state)
    targets = [
        target or _allocate(piece, parameters) for piece, target in zip(layout.pieces, found, strict=True)
    ]
    copies = []
    for name, _, position in layout.aliases:
        named = live.get(name)
        if named is None or not layout.pieces[position].matches(named.local):
            continue
        if same_memory_key(named.local) != same_memory_key(targets[position][0]):
            copies.append((position, named.local))
    return Binding([local for local, _ in targets], [whole for _, whole in targets], copies, allocated, own)


def _check_entries(layout: Layout, own: Snapshot) -> None:
    if layout.kinds == own.kinds:
        return
    for key in [*layout.kinds, *own.kinds]:
        there, here = layout.kinds.get(key, "nothing"), own.kinds.get(key, "nothing")
        if there != here:
            raise StateError(
                f"state entry {key!r}: {there} at the sender, {here} here; build() must give every rank "
                "the same entries"
            )


def _check_modules(layout: Layout, live: Mapping[str, NamedTensor]) -> None:
    """Every module tensor of either side is on the other, with one shape and dtype."""
    there = {piece.name: piece for piece in layout.pieces if piece.kind == MODULE}
    there |= {name: layout.pieces[position] for name, kind, position in layout.aliases if kind == MODULE}
    here = {name: named for name, named in live.items() if named.kind == MODULE}
    for name, piece in there.items():
        named = here.get(name)
        if named is None:
            raise StateError(f"{name}: the sender has it ({piece.describe()}), this rank has not; {SAME}")
        if not piece.matches(named.local):
            found = f"{str(named.local.dtype).removeprefix('torch.')} {list(named.local.shape)}"
            raise StateError(f"{name}: {piece.describe()} at the sender, {found} here; {SAME}")
    for name in here:
        if name not in there:
            raise StateError(f"{name}: this rank has it, the sender has not; {SAME}")


def _live_target(piece: Piece, live: Mapping[str, NamedTensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    if piece.kind not in (MODULE, OPTIMIZER):
        return None  # what load_state_dict() gets must not be what state_dict() may have shown of the inside
    named = live.get(piece.name)
    if named is None or not piece.matches(named.local) or named.wrapper != piece.wrapper:
        if piece.kind == MODULE and named is not None:
            raise StateError(
                f"{piece.name}: {piece.wrapper or 'a plain tensor'} at the sender, "
                f"{named.wrapper or 'a plain tensor'} here"
            )
        return None
    return named.local, named.whole


def _check_ties(layout: Layout, found: list[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
    """Two pieces of the sender must not land in the same memory here."""
    taken: dict[tuple[object, ...], str] = {}
    for piece, target in zip(layout.pieces, found, strict=True):
        if target is None or piece.nbytes == 0:
            continue
        other = taken.setdefault(same_memory_key(target[0]), piece.name)
        if other != piece.name:
            raise StateError(
                f"{piece.name} and {other} share memory here, not at the sender; build() must tie the "
                "same weights"
            )


def _parameters(state: Mapping[str, Any]) -> dict[str, list[torch.Tensor]]:
    optimizers = {key: value for key, kind, value in state_entries(state) if kind == OPTIMIZER}
    for key, value in list(optimizers.items()):
        inner = inner_optimizer(value)
        if inner is not None:
            optimizers[f"{key}/inner"] = inner
    return {
        key: [parameter for group in value.param_groups for parameter in group["params"]]
        for key, value in optimizers.items()
    }


def _allocate(
    piece: Piece, parameters: Mapping[str, list[torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    owner = _owner(piece, parameters)
    if piece.wrapper:
        local = None
        if piece.wrapper == "dtensor" and owner is not None and hasattr(owner, "_local_tensor"):
            whole = torch.empty_like(owner, dtype=piece.dtype)
            local = getattr(whole, "_local_tensor", None)
        if local is None or not piece.matches(local):
            raise StateError(
                f"{piece.name}: a {piece.wrapper} of {piece.describe()} that this rank has not and cannot "
                "make; "
                "run a shadow step first, which makes the optimizer's state"
            )
        return local, whole
    device = owner.device if owner is not None and piece.device != "cpu" else "cpu"
    tensor = torch.empty_strided(piece.shape, piece.stride, dtype=piece.dtype, device=device)
    return tensor, tensor


def _owner(piece: Piece, parameters: Mapping[str, list[torch.Tensor]]) -> torch.Tensor | None:
    for key, known in parameters.items():
        if piece.name.startswith(f"{key}/state.") and 0 <= piece.parameter < len(known):
            return known[piece.parameter]
    return None
