"""Windows of real text as a data set, for the examples of frameworks that bring their own loops."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from tm_slurm.examples.char_gpt_data import read_text
from tm_slurm.examples.char_gpt_options import DataOptions

TEXT_BYTES = 1 << 20


class TextWindows(Dataset[dict[str, torch.Tensor]]):
    """Item i: the i-th `context` bytes of the standard library, int64 [context], as input and label."""

    def __init__(self, context: int = 32) -> None:
        self._text = torch.from_numpy(read_text(DataOptions(max_bytes=TEXT_BYTES)).train.copy())
        self._context = context

    def __len__(self) -> int:
        return len(self._text) // self._context

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self._text[index * self._context : (index + 1) * self._context].long()
        return {"input_ids": window, "labels": window}
