"""Read what `scontrol -o show node|job|partition|reservations` prints: a record a line, of `Key=value` pairs.

The format is the same from 22.05 to 26.05. Values that people write (a job's name and comment, a node's
reason) may hold `State=IDLE` or anything else; they are set aside before the rest is read, so they are
never taken for Slurm's word. Times are Unix seconds: the commands run with SLURM_TIME_FORMAT=%s.
"""

from __future__ import annotations

import re

from tm_slurm.slurm.hostlist import expand
from tm_slurm.slurm.interface import JobInfo, NodeInfo, PartitionInfo, ReservationInfo
from tm_slurm.slurm.node_state import NodeState

_PAIR = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=(\S*)")
_NODE_TEXTS = re.compile(r"\s(?=(?:Comment|Extra|Reason)=)")
_REASON_SIGNATURE = re.compile(r" \[([^\s\[\]@]+)@(\d+|Unknown)\]")
_JOB_NAME = re.compile(r"^(JobId=.*?\bJobName=)(.*)(\sUserId=\S+\(\d+\) GroupId=)")
_JOB_COMMAND = re.compile(r"\sCommand=(?=.*\sWorkDir=)")
_JOB_COMMENT = re.compile(r"\sComment=(.*?) ?(?=\s(?:StdErr|StdIn|StdOut|Power|TresPer\w+|MailUser)=|$)")
_JOB_WORK_DIR = re.compile(
    r"\sWorkDir=(.*?)(?=\s(?:AdminComment|SystemComment|Comment|StdErr|StdIn|Power)=|$)"
)
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)\Z")

_NOTHING = {"", "(null)", "N/A", "n/a", "None", "Unknown", "UNLIMITED", "INFINITE", "Partition_Limit"}


class ScontrolFormatError(ValueError):
    """A record lacks what every known Slurm release prints; the message quotes the record's beginning."""


def parse_nodes(text: str) -> dict[str, NodeInfo]:
    """Read the output of `scontrol -o show node`; lines that are no node record are left out."""
    nodes = (_parse_node(line) for line in text.splitlines() if line.startswith("NodeName="))
    return {node.name: node for node in nodes}


def parse_jobs(text: str) -> list[JobInfo]:
    """Read the output of `scontrol -o show job`; lines that are no job record are left out."""
    return [_parse_job(line) for line in text.splitlines() if line.startswith("JobId=")]


def parse_partitions(text: str) -> dict[str, PartitionInfo]:
    """Read the output of `scontrol -o show partition`."""
    found: dict[str, PartitionInfo] = {}
    for line in text.splitlines():
        if not line.startswith("PartitionName="):
            continue
        pairs = _first_pairs(line)
        max_nodes = pairs.get("MaxNodes", "")
        found[pairs["PartitionName"]] = PartitionInfo(
            name=pairs["PartitionName"],
            state=pairs.get("State", "UNKNOWN"),
            is_default=pairs.get("Default") == "YES",
            nodes=tuple(expand(pairs.get("Nodes", ""))),
            max_nodes=int(max_nodes) if max_nodes.isdigit() else None,
            max_time_s=parse_duration(pairs.get("MaxTime", "")),
        )
    return found


def parse_reservations(text: str) -> dict[str, ReservationInfo]:
    """Read the output of `scontrol -o show reservations`; lines that are no such record are left out."""
    found = (_parse_reservation(line) for line in text.splitlines() if line.startswith("ReservationName="))
    return {reservation.name: reservation for reservation in found}


def parse_duration(text: str) -> float | None:
    """Read `[days-][hours:]minutes:seconds` into seconds; None for UNLIMITED and the other words for "no
    limit".
    """
    match = _DURATION.match(text)
    if not match:
        if text in _NOTHING:
            return None
        raise ScontrolFormatError(f"expected a duration such as 1-02:03:04, found {text!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _parse_node(line: str) -> NodeInfo:
    head, *texts = _NODE_TEXTS.split(line, maxsplit=1)
    pairs = _first_pairs(head)
    if "State" not in pairs:
        raise ScontrolFormatError(f"no State= in the node record {line[:120]!r}")
    written = " " + texts[0] if texts else ""
    reason, user, at = _parse_reason(written.partition(" Reason=")[2])
    return NodeInfo(
        name=pairs["NodeName"],
        state=NodeState.parse(pairs["State"]),
        reason=reason,
        reason_user=user,
        reason_at=at,
        address=pairs.get("NodeAddr", pairs["NodeName"]),
        hostname=pairs.get("NodeHostName", pairs["NodeName"]),
        cpus=int(pairs.get("CPUEfctv") or pairs.get("CPUTot") or 0),
        boot_time=_time(pairs.get("BootTime", "")),
        slurmd_start_time=_time(pairs.get("SlurmdStartTime", "")),
        partitions=tuple(name for name in pairs.get("Partitions", "").split(",") if name not in _NOTHING),
        version=pairs.get("Version", ""),
    )


def _parse_reason(text: str) -> tuple[str, str, float | None]:
    """Split `disk [root@1795961374]        second line` into the words, who wrote them, and when."""
    signature = _REASON_SIGNATURE.search(text)
    if not signature:
        return " ".join(text.split()), "", None
    words = text[: signature.start()] + " " + _NODE_TEXTS.split(text[signature.end() :], maxsplit=1)[0]
    return " ".join(words.split()), signature[1], _time(signature[2])


def _parse_job(line: str) -> JobInfo:
    name = ""
    named = _JOB_NAME.match(line)
    if named:
        name = named[2]
        line = named[1] + line[named.end(2) :]
    head, *tail = _JOB_COMMAND.split(line, maxsplit=1)
    pairs = _first_pairs(head)
    if "JobState" not in pairs:
        raise ScontrolFormatError(f"no JobState= in the job record {line[:120]!r}")
    texts = tail[0] if tail else head
    comment = _JOB_COMMENT.search(texts)
    work_dir = _JOB_WORK_DIR.search(texts)
    exit_code, _, exit_signal = pairs.get("ExitCode", "0:0").partition(":")
    batch_host = pairs.get("BatchHost", "")
    return JobInfo(
        job_id=int(pairs["JobId"]),
        name=name,
        user=pairs.get("UserId", "").partition("(")[0],
        state=pairs["JobState"].partition(",")[0],
        state_reason=pairs.get("Reason", "").replace("None", ""),
        nodes=tuple(expand(pairs.get("NodeList", ""))),
        batch_host=None if batch_host in _NOTHING else batch_host,
        comment=_nothing_to_empty(comment[1]) if comment else "",
        partition=pairs.get("Partition", ""),
        time_limit_s=parse_duration(pairs.get("TimeLimit", "")),
        submit_time=_time(pairs.get("SubmitTime", "")),
        start_time=_time(pairs.get("StartTime", "")),
        end_time=_time(pairs.get("EndTime", "")),
        requeue=pairs.get("Requeue") == "1",
        restarts=int(pairs.get("Restarts", "0")),
        work_dir=work_dir[1] if work_dir else "",
        exit_code=int(exit_code),
        exit_signal=int(exit_signal or 0),
        array_element=_array_element(pairs),
        reservations=tuple(n for n in pairs.get("Reservation", "").split(",") if n not in _NOTHING),
        preempt_time=_time(pairs.get("PreemptTime", "")),
    )


def _parse_reservation(line: str) -> ReservationInfo:
    pairs = _first_pairs(line)
    start, end = _time(pairs.get("StartTime", "")), _time(pairs.get("EndTime", ""))
    if start is None or end is None:
        raise ScontrolFormatError(f"no StartTime= and EndTime= in the reservation record {line[:120]!r}")
    held = dict(part.partition("=")[::2] for part in pairs.get("TRES", "").split(","))
    return ReservationInfo(
        name=pairs["ReservationName"],
        nodes=tuple(expand(_nothing_to_empty(pairs.get("Nodes", "")))),
        start_time=start,
        end_time=end,
        flags=frozenset(flag for flag in pairs.get("Flags", "").split(",") if flag not in _NOTHING),
        cpus=int(held["cpu"]) if held.get("cpu", "").isdigit() else None,
    )


def _array_element(pairs: dict[str, str]) -> str:
    """`7_2`; nothing for a record of elements that have no id of their own yet (ArrayTaskId=3-9)."""
    task = pairs.get("ArrayTaskId", "")
    return f"{pairs['ArrayJobId']}_{task}" if task.isdigit() and "ArrayJobId" in pairs else ""


def _first_pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for match in _PAIR.finditer(text):
        pairs.setdefault(match[1], match[2])
    return pairs


def _time(text: str) -> float | None:
    return None if text in _NOTHING or not text.isdigit() or text == "0" else float(text)


def _nothing_to_empty(text: str) -> str:
    return "" if text in _NOTHING else text
