"""Answers questions about nodes, jobs and partitions by pyslurm, in a process of its own: what it calls is C.

    python -m tm_slurm.slurm.pyslurm_worker

One JSON object a line, `{"ask": "nodes", "of": ["n1"]}`; one a line in answer, with `answer`, `refused` or
`unavailable`. libslurm ends the process when it finds no configuration; that, too, is an answer: none.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyslurm

ONE_NODE_COSTS = 250
"""Loading one node costs as much as so many of those that are loaded together. Measured with 26.05: one takes
0.6 ms (it is two questions), all of 1,000 take 2 ms, all of 4,000 take 16."""

NO_SUCH_NODE = ("does not exist", "invalid node name")

RELEASE = re.compile(rb"\0(\d\d\.\d\d)\.\d+(?:-\w+)?\0")
NO_LIMIT = {None, "UNLIMITED", "INFINITE"}


def library_release() -> str:
    """The release X.Y of the libslurm that this process has loaded; empty if it cannot be told. None of its
    functions says it (slurm_api_version is another number), so it is looked up among its words."""
    with open("/proc/self/maps") as maps:
        paths = set(re.findall(r"/\S*/libslurm(?:full)?[-.\d]*\.so\S*", maps.read()))
    found = {said for path in paths for said in RELEASE.findall(Path(path).read_bytes())}
    return found.pop().decode() if len(found) == 1 else ""


def releases(_: Any) -> dict[str, str]:
    """Of the library here and of the controller."""
    controller = str(pyslurm.slurmctld.Config.load().version)
    return {"library": library_release(), "controller": ".".join(controller.split(".")[:2])}


def nodes(names: list[str]) -> list[dict[str, Any]]:
    """Fields of NodeInfo, of those nodes that Slurm knows."""
    if _cluster.is_worth_loading_whole(len(names)):
        found = pyslurm.Nodes.load()
        _cluster.size = len(found)
        return [node_fields(found[name]) for name in names if name in found]
    loaded = map(_node, names)
    return [node_fields(node) for node in loaded if node is not None]


class _Cluster:
    """How many nodes there are, as far as is known: pyslurm loads one of them or all."""

    size: int | None = None

    def is_worth_loading_whole(self, count: int) -> bool:
        """Whether that costs less than to load `count` one by one."""
        return self.size is None or count * ONE_NODE_COSTS > self.size


_cluster = _Cluster()


def _node(name: str) -> Any:
    """None for a node that Slurm does not know."""
    try:
        return pyslurm.Node.load(name)
    except pyslurm.RPCError as error:
        if any(words in str(error).lower() for words in NO_SUCH_NODE):
            return None
        raise


def node_fields(node: Any) -> dict[str, Any]:
    return {
        "name": node.name,
        "state": node.state,
        "reason": " ".join((node.reason or "").split()),
        "reason_user": node.reason_user or "",
        "reason_at": seconds(node.reason_time),
        "address": node.address or node.name,
        "hostname": node.hostname or node.name,
        "cpus": node.effective_cpus or node.total_cpus or 0,
        "boot_time": seconds(node.boot_time),
        "slurmd_start_time": seconds(node.slurmd_start_time),
        "partitions": list(node.partitions or []),
        "version": node.slurm_version or "",
    }


def job(job_id: int) -> dict[str, Any]:
    """Fields of JobInfo; node and reservation names as Slurm writes them."""
    try:
        found = pyslurm.Job.load(job_id)
    except KeyError:  # it looks for the steps of a job that has none any more, if the job is of an array
        found = None
    if found is None or found.id != job_id:  # the number of an array: the answer is about all its elements
        found = pyslurm.Jobs.load()[job_id]
    element = found.array_task_id is not None and found.array_id is not None
    return {
        "job_id": found.id,
        "name": found.name or "",
        "user": found.user_name or "",
        "state": found.state.partition(",")[0],
        "state_reason": "" if found.state_reason in (None, "None") else found.state_reason,
        "nodes": found.allocated_nodes or "",
        "batch_host": found.batch_host or None,
        "comment": found.comment or "",
        "partition": found.partition or "",
        "time_limit_s": None if found.time_limit in NO_LIMIT else 60.0 * found.time_limit,
        "submit_time": seconds(found.submit_time),
        "start_time": seconds(found.start_time),
        "end_time": seconds(found.end_time),
        "requeue": bool(found.is_requeueable),
        "restarts": found.requeue_count or 0,
        "work_dir": found.working_directory or "",
        "exit_code": found.exit_code or 0,
        "exit_signal": found.exit_code_signal or 0,
        "array_element": f"{found.array_id}_{found.array_task_id}" if element else "",
        "reservations": found.reservation or "",
        "preempt_time": seconds(found.preempt_time),
    }


def partitions(_: Any) -> list[dict[str, Any]]:
    """Fields of PartitionInfo; node names as Slurm writes them."""
    return [
        {
            "name": found.name,
            "state": found.state,
            "is_default": bool(found.is_default),
            "nodes": found.nodes or "",
            "max_nodes": None if found.max_nodes in NO_LIMIT else found.max_nodes,
            "max_time_s": None if found.max_time in NO_LIMIT else 60.0 * found.max_time,
        }
        for found in pyslurm.Partitions.load().values()
    ]


def seconds(time: int | None) -> float | None:
    return float(time) if time else None


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "releases": releases,
    "nodes": nodes,
    "job": job,
    "partitions": partitions,
}


def answer(line: str) -> dict[str, Any]:
    question = json.loads(line)
    try:
        return {"answer": QUESTIONS[question["ask"]](question.get("of"))}
    except pyslurm.RPCError as error:
        return {"refused": " ".join(str(error).split())}
    except Exception as error:  # pyslurm reads some answers wrongly where releases differ
        return {"unavailable": f"{type(error).__name__}: {error}"}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)


if __name__ == "__main__":
    main()
