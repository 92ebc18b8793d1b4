"""Whether the shell that a command was typed in has a Slurm cluster at all."""

from __future__ import annotations

from tm_slurm.cli.failures import Failed, UserMistake
from tm_slurm.slurm import SlurmUnavailable
from tm_slurm.slurm.configuration import configuration_file


def require_configuration() -> None:
    """UserMistake when SLURM_CONF names a file that is not there: Slurm's commands would wait for it."""
    path = configuration_file()
    if path is not None and not path.is_file():
        raise UserMistake(f"SLURM_CONF: no such file: {path}; is the cluster down?")


def no_answer(error: SlurmUnavailable, command: str) -> Failed | UserMistake:
    """What to raise for a question that was not answered; `command` is what was typed after tm-slurm."""
    if configuration_file() is None and "configuration source" in str(error).lower():
        return UserMistake(
            "no Slurm configuration here: export SLURM_CONF=/path/to/slurm.conf, or "
            f"`tm-slurm cluster run -- tm-slurm {command}`"
        )
    return Failed(str(error))
