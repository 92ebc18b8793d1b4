"""What `scontrol show config` says, and what each setting means for a job of tm_slurm."""

from __future__ import annotations

import re
from collections.abc import Callable

from tm_slurm.doctor.finding import Finding, failed, passed, warned

Settings = dict[str, str]

_LINE = re.compile(r"^\s*([A-Za-z_]\w*)(?:\[\d+\])?\s*=\s?(.*?)\s*$")
_NOTHING = {"(null)", "N/A", "NONE"}

RECONFIGURE = "then: scontrol reconfigure"
BUSY_NODE_S = 30
END_S = 5


def parse_config(text: str) -> Settings:
    """Key to value; nothing for `(null)`. Of a key that comes several times (`Prolog[0]`) all, by commas."""
    found: Settings = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            value = "" if match[2] in _NOTHING else match[2]
            found[match[1]] = f"{found[match[1]]},{value}" if found.get(match[1]) else value
    return found


def seconds(value: str) -> int | None:
    """`300 sec` or `5 min`; None for what is no duration."""
    match = re.match(r"(\d+)(?: (sec|min))?$", value)
    return int(match[1]) * (60 if match[2] == "min" else 1) if match else None


def release(version: str) -> tuple[int, int]:
    """(22, 5) of `22.05.8`; (0, 0) of what is no version."""
    match = re.search(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def slurmd_timeout(settings: Settings) -> Finding:
    check = "SlurmdTimeout"
    found = seconds(settings.get(check, ""))
    if found is None:
        return _unknown(check)
    said = f"{found} s"
    if found == 0:
        meaning = "Slurm never calls a silent node DOWN: it stays in the job, and no standby comes for it"
        return warned(check, said, meaning, f"slurm.conf: SlurmdTimeout=300; {RECONFIGURE}")
    if found < BUSY_NODE_S:
        meaning = "a node that is only busy may be called DOWN, and its healthy tasks be killed"
        return warned(check, said, meaning, f"slurm.conf: SlurmdTimeout=300; {RECONFIGURE}")
    return passed(check, said, "so long Slurm waits for a silent node; tm_slurm waits policy.keepalive_s")


def kill_wait(settings: Settings) -> Finding:
    check = "KillWait"
    found = seconds(settings.get(check, ""))
    if found is None:
        return _unknown(check)
    if found < END_S:
        meaning = "rank processes have too little time to end by themselves when a job is cancelled"
        return warned(check, f"{found} s", meaning, f"slurm.conf: KillWait=30; {RECONFIGURE}")
    return passed(check, f"{found} s", "from SIGTERM to SIGKILL; checkpoints go by job.signal_delay_s")


def return_to_service(settings: Settings) -> Finding:
    check = "ReturnToService"
    found = settings.get(check, "")
    if found == "0":
        meaning = "a node that was DOWN stays so when it is back: it cannot become a standby again by itself"
        mend = f"slurm.conf: ReturnToService=1; {RECONFIGURE}; or: scontrol update nodename=N state=resume"
        return warned(check, found, meaning, mend)
    about = {"1": "a node that was silent comes back", "2": "a node comes back, rebooted ones too"}
    return passed(check, found, about[found]) if found in about else _unknown(check)


def preempt_mode(settings: Settings) -> Finding:
    check = "PreemptMode"
    found = settings.get(check, "")
    modes = set(found.split(",")) if found else set()
    if not modes:
        return _unknown(check)
    if modes == {"OFF"} or settings.get("PreemptType") == "preempt/none":
        return passed(check, found, "no job is preempted")
    told = "preempt_send_user_signal" in settings.get("SlurmctldParameters", "")
    signal = "slurm.conf: SlurmctldParameters=preempt_send_user_signal, and GraceTime=120 for the partition"
    if modes & {"SUSPEND", "GANG"}:
        meaning = "a suspended node looks frozen to the others: its ranks are moved, or the job stands still"
        return failed(check, found, meaning, f"slurm.conf: PreemptMode=REQUEUE; {RECONFIGURE}; {signal}")
    if not told:
        what = "is requeued from its last checkpoint" if "REQUEUE" in modes else "is lost"
        meaning = f"a preempted job gets SIGTERM as for scancel, writes no checkpoint, and {what}"
        return warned(check, found, meaning, signal)
    return passed(check, found, "a preempted job writes a checkpoint, if its partition has a GraceTime")


def requeue_exit(settings: Settings) -> Finding:
    check = "RequeueExit"
    words = [settings.get(name, "") for name in (check, "RequeueExitHold")]
    codes = {code for word in words for code in _codes(word)}
    shown = ", ".join(
        f"{name}={word}" for name, word in zip((check, check + "Hold"), words, strict=True) if word
    )
    mend = f"slurm.conf: no {check} of 0 or 1; {RECONFIGURE}"
    if 0 in codes:
        return failed(check, shown, "a job that is done is put back into the queue, and trains again", mend)
    if 1 in codes:
        meaning = "a job that failed for good (exit code 1) is started again, whatever job.max_requeues says"
        return warned(check, shown, meaning, mend)
    return passed(check, shown or "none", "a job decides by itself whether it is requeued")


def prolog_flags(settings: Settings) -> Finding:
    check = "PrologFlags"
    flags = {flag for flag in settings.get(check, "").split(",") if flag}
    found = ",".join(sorted(flags)) or "none"
    if "Serial" in flags:
        meaning = "prologs and steps of a node wait for each other: a standby that joins waits as well"
        return warned(check, found, meaning, f"slurm.conf: PrologFlags without Serial; {RECONFIGURE}")
    if "NoHold" in flags:
        meaning = "a job starts before the prologs of its nodes have ended: checks of health come late"
        return warned(check, found, meaning, f"slurm.conf: PrologFlags=Alloc; {RECONFIGURE}")
    if flags & {"Alloc", "Contain"}:
        return passed(check, found, "the prolog runs on all nodes when the job gets them")
    return passed(check, found, "the prolog runs on a node when the first step comes to it")


def inactive_limit(settings: Settings) -> Finding:
    check = "InactiveLimit"
    found = seconds(settings.get(check, ""))
    if found is None:
        return _unknown(check)
    if found:
        meaning = (
            "Slurm ends an allocation whose salloc is gone: no batch job, and no job with launch: allocation "
            "(salloc --no-shell)"
        )
        return passed(check, f"{found} s", meaning)
    return passed(check, "0", "nothing ends because its srun or salloc is gone")


def private_data(settings: Settings) -> Finding:
    check = "PrivateData"
    found = settings.get(check, "") or "none"
    hidden = set(found.lower().split(","))
    mend = f"slurm.conf: {check} without {{}}; {RECONFIGURE}"
    if "nodes" in hidden:
        meaning = "a job cannot see that its nodes are drained: it never leaves them"
        return failed(check, found, meaning, mend.format("nodes"))
    if "reservations" in hidden:
        meaning = "a job does not see maintenance windows before they open"
        return warned(check, found, meaning, mend.format("reservations"))
    return passed(check, found, "a job sees its nodes and the reservations over them")


def resizing(settings: Settings) -> Finding:
    check = "resizing"
    storage = settings.get("AccountingStorageType", "") or "accounting_storage/none"
    version = settings.get("SLURM_VERSION", "")
    if storage.endswith("/none") and (0, 0) < release(version) <= (24, 5):
        meaning = (
            "this release shrinks a running job once only: nodes drained later stay DRAINING until it ends"
        )
        mend = "slurm.conf: AccountingStorageType=accounting_storage/slurmdbd, and run slurmdbd"
        return warned(check, f"Slurm {version}, {storage}", meaning, mend)
    return passed(check, f"Slurm {version}, {storage}", "drained nodes are given back one after the other")


def process_tracking(settings: Settings) -> Finding:
    check = "ProctrackType"
    found = settings.get(check, "")
    if found.endswith("/cgroup"):
        return passed(check, found, "whatever a step leaves behind ends with it")
    meaning = "a process that leaves its session can outlive the job on its node"
    return warned(
        check, found or "none", meaning, "slurm.conf: ProctrackType=proctrack/cgroup; restart slurmd"
    )


def same_configuration(settings: Settings) -> Finding:
    check = "slurm.conf"
    found = settings.get("HASH_VAL", "")
    if found.startswith("Different"):
        meaning = "the file here is not the one that slurmctld has read"
        return failed(check, found, meaning, "copy slurm.conf to all machines, then: scontrol reconfigure")
    return passed(check, found or "not compared", f"cluster {settings.get('ClusterName', '?')}")


CHECKS: tuple[Callable[[Settings], Finding], ...] = (
    same_configuration,
    slurmd_timeout,
    kill_wait,
    return_to_service,
    preempt_mode,
    requeue_exit,
    prolog_flags,
    inactive_limit,
    private_data,
    resizing,
    process_tracking,
)


def _codes(word: str) -> set[int]:
    """`1,3-5` as numbers."""
    found: set[int] = set()
    for part in word.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last if last.isdigit() else first) + 1))
    return found


def _unknown(check: str) -> Finding:
    meaning = "this Slurm does not say it"
    return warned(check, "unknown", meaning, f"scontrol show config | grep {check}")
