"""Every test begins without a process group, whatever the one before it has initialised."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from job_on_disk import job  # noqa: F401  (a fixture)
from login_node import login  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    yield
    if "torch.distributed" in sys.modules:
        distributed = sys.modules["torch.distributed"]
        if distributed.is_initialized():
            distributed.destroy_process_group()
