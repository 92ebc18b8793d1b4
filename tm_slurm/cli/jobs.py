"""Finding a job's directory by what people have at hand: its directory, or its Slurm job id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tm_slurm.cli.failures import Failed, NotFound, NotPermitted
from tm_slurm.cli.slurm_word import ask_slurm
from tm_slurm.submit.registry import clusters_with, registered

ANSWER_LIMIT_S = 5.0


def find_job_dir(job: str) -> Path:
    """The directory of `job`, a job id or the directory itself. NotFound or NotPermitted otherwise."""
    path = Path(job)
    if (path / "config.yaml").exists():
        return path
    if job.isdigit():
        found = registered(int(job))
        if found is not None:
            try:
                if (found / "config.yaml").exists():
                    return found
            except PermissionError:
                raise NotPermitted(f"job {job} belongs to somebody else: {found} cannot be read") from None
        elsewhere = clusters_with(int(job))
        if elsewhere:
            raise NotFound(
                f"job {job} is one of {' and of '.join(elsewhere)}: set SLURM_CONF to the cluster's "
                "slurm.conf, or give the job directory"
            )
        word = ask_slurm(int(job))
        if word is not None and word.is_pending:
            raise NotFound(
                f"job {job} is pending ({word.why_pending}): if it is one of tm_slurm, "
                "it has no directory yet"
            )
    raise NotFound(
        f"no tm_slurm job {job}: expected a job id, a job's name or a job directory (see `squeue --me`)"
    )


def ask_leader(job_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Send one request to the job's coordinator and return its answer. Failed when nobody leads."""
    import asyncio

    from tm_slurm.control import ChannelClosed, HandshakeRefused, connect, read_secret
    from tm_slurm.coordinator.election import LeaderFile

    try:
        secret = read_secret(job_dir)
    except PermissionError:
        raise NotPermitted(
            f"{job_dir}/secret cannot be read: only the job's owner can ask its coordinator"
        ) from None
    except (OSError, ValueError) as error:
        raise Failed(str(error)) from None
    leader = LeaderFile.read(job_dir)
    if leader is None:
        raise Failed(f"no coordinator has started yet in {job_dir}: is the job running?")

    async def ask() -> dict[str, Any]:
        channel = await connect(leader.host, leader.port, secret, {"role": "user"}, timeout_s=ANSWER_LIMIT_S)
        channel.send(request)
        answer = await asyncio.wait_for(channel.receive(), ANSWER_LIMIT_S)
        await channel.close()
        return answer

    try:
        return asyncio.run(ask())
    except (OSError, HandshakeRefused, ChannelClosed, asyncio.TimeoutError) as error:
        reason = str(error) or "no answer in time"
        raise Failed(f"the coordinator on {leader.node} ({leader.host}) did not answer: {reason}") from None
