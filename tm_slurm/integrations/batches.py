"""Batches by the number of the step, so that a step that is done again, or elsewhere, has the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from tm_slurm.integrations.framework_loop import current_loop
from tm_slurm.runtime import Role

WITHOUT_END = 1 << 40
"""The length that a framework is told: how many there are, `tm_slurm.integrations.run` decides."""


class StepBatches:
    """What a framework iterates over instead of a DataLoader: the batches of one rank, epoch after epoch, at
    the place in them that belongs to the step in progress.

    Each epoch deals `dataset` (which has a length) out anew to the ranks, `batch_size` samples each; what is
    left over is left out. `per_step`: batches of one optimizer step (gradient accumulation). `options`: of
    DataLoader (collate_fn, num_workers, …). Random augmentations come out the same again with `num_workers=0`
    alone: a worker's generators are not part of a rank's state. ValueError when there is not one whole batch
    for each rank.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        role: Role,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        per_step: int = 1,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            dataset,
            num_replicas=role.world_size,
            rank=role.rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=True,
        )
        self._batch_size = batch_size
        self._seed = seed
        self.per_step = per_step
        self._options = options
        self._of_an_epoch = len(self._sampler) // batch_size
        if not self._of_an_epoch:
            raise ValueError(
                f"expected at least {batch_size * role.world_size} samples (batch_size {batch_size} on "
                f"{role.world_size} ranks), found {len(dataset)}"  # type: ignore[arg-type]
            )
        self._given = 0
        """of this step"""
        self._first = 0
        self._batch: Any = None
        self._at = (-1, -1)
        self._iterator: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return WITHOUT_END

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._given == 0:
            step = current_loop().begin_step()
            if step is None:
                raise StopIteration
            self._first = step * self.per_step
        if not current_loop().is_void:  # else any will do: nothing is computed with it
            self._batch = self._number(self._first + self._given)
        self._given = (self._given + 1) % self.per_step
        return self._batch

    def _number(self, number: int) -> Any:
        """The batch with that number since the start of the job."""
        place = divmod(number, self._of_an_epoch)
        if place != self._at:
            self._go_to(*place)
        self._at = (place[0], place[1] + 1)
        return next(self._iterator)

    def _go_to(self, epoch: int, index: int) -> None:
        """The loader draws the seed of its workers from a generator of its own: the global ones belong to the
        steps, and a process that comes in the middle of an epoch must not draw from them once more."""
        self._sampler.set_epoch(epoch)
        batches = list(BatchSampler(self._sampler, self._batch_size, drop_last=True))
        generator = torch.Generator().manual_seed(self._seed + epoch)
        self._iterator = iter(
            DataLoader(self.dataset, batch_sampler=batches[index:], generator=generator, **self._options)
        )
