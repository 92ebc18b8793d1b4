"""What a run ends with when nothing happens to it: the digests that every disturbed run is compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_jobs import TrainingJob

from tm_slurm.localcluster import LocalCluster

_KNOWN: dict[str, list[str]] = {}


@pytest.fixture
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Digests of an undisturbed run of the tiny training with these settings; one run for the whole
    session."""

    def digests(**settings: Any) -> list[str]:
        key = repr(sorted(settings.items()))
        if key not in _KNOWN:
            directory: Path = tmp_path_factory.mktemp("undisturbed")
            _KNOWN[key] = TrainingJob.submit(cluster, directory, standbys=0, **settings).finish()
        return _KNOWN[key]

    return digests
