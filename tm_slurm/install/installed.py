"""The administrators' part below a prefix (spank/Makefile puts it there), and what refers to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_PREFIX = Path("/usr/local")

TRIGGERS = ("down", "drained", "fail")
"""Events of strigger that every supported Slurm knows. `draining` came later."""

NEWER_TRIGGERS = ("draining",)

HEALTH_INTERVAL_S = 60


@dataclass(frozen=True)
class Installed:
    """Paths below `prefix`, an absolute path."""

    prefix: Path = DEFAULT_PREFIX

    @property
    def libexec(self) -> Path:
        return self.prefix / "libexec" / "tm_slurm"

    @property
    def plugin(self) -> Path:
        return self.prefix / "lib" / "tm_slurm" / "tm_slurm.so"

    @property
    def plugstack(self) -> Path:
        """A plugstack.conf with the plugin's line."""
        return self.prefix / "etc" / "tm_slurm" / "plugstack.conf"

    @property
    def notify(self) -> Path:
        return self.libexec / "tm-notify"

    @property
    def is_there(self) -> bool:
        """Whether the plugin and the programs are in place."""
        return all(path.exists() for path in (self.plugin, self.plugstack, self.notify))

    def slurm_conf(self) -> list[str]:
        """Lines for slurm.conf, the same on all nodes."""
        return [
            f"Prolog={self.libexec}/prolog.d/*",
            f"Epilog={self.libexec}/epilog.d/*",
            f"HealthCheckProgram={self.libexec}/health",
            f"HealthCheckInterval={HEALTH_INTERVAL_S}",
        ]

    def plugstack_conf(self) -> list[str]:
        """Lines for plugstack.conf, on the nodes and wherever jobs are submitted."""
        return [f"include {self.plugstack}"]

    def trigger_commands(self) -> list[str]:
        """Commands to be run once as SlurmUser; slurmctld keeps what they set."""
        return [
            f"strigger --set --node --{event} --flags=perm --program={self.libexec}/trigger-{event}"
            for event in (*TRIGGERS, *NEWER_TRIGGERS)
        ]

    def sudoers(self, slurm_user: str = "slurm") -> list[str]:
        """A line for sudoers where SlurmUser is not root: only root can read the secrets of all users."""
        return [f"{slurm_user} ALL=(root) NOPASSWD: {self.notify}"]
