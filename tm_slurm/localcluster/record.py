"""What a running cluster is made of, as written in its directory: the request, and what was picked for it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from tm_slurm.localcluster.errors import LocalClusterError
from tm_slurm.localcluster.layout import Layout
from tm_slurm.localcluster.processes import ProcessId, boot_id


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for. Two requests for one cluster must be equal to share it."""

    name: str
    mode: str
    nodes: int
    cpus: int
    slurmd_timeout_s: int
    features: dict[str, str] = field(default_factory=dict)
    extra_conf: str = ""
    administration: str = ""

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))


@dataclass(kw_only=True)
class Record:
    """A cluster on this machine. `subnet` is the x of 10.77.x.0/24 (namespaces); `ports` those of plain mode.

    `processes` holds munged, slurmctld and the hosts by name: `ctl` and `n1`… are the processes that hold the
    namespaces; in plain mode `n1`… are the slurmd.
    """

    request: Request
    boot: str = field(default_factory=boot_id)
    subnet: int | None = None
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, ProcessId] = field(default_factory=dict)

    def process(self, name: str) -> ProcessId | None:
        """The living process of that name, or None."""
        found = self.processes.get(name)
        return found if found is not None and self.boot == boot_id() and found.alive() else None

    def save(self, layout: Layout) -> None:
        draft = layout.record.with_name(layout.record.name + ".new")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(draft, layout.record)

    @classmethod
    def load(cls, layout: Layout) -> Record | None:
        """The record in a directory; None if there is none, or one that was torn or is of another version.

        Raises:
            LocalClusterError: it is there and may not be read.
        """
        try:
            raw: dict[str, Any] = json.loads(layout.record.read_text())
            processes = {name: ProcessId(**item) for name, item in raw.pop("processes").items()}
            return cls(request=Request(**raw.pop("request")), processes=processes, **raw)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            raise LocalClusterError(f"{layout.record} may not be read by you: ask its owner") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
