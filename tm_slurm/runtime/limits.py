"""How long anything here may wait, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from tm_slurm.config.model import SLOWEST_BYTES_S, PolicyConfig

HANDSHAKE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TransferLimits:
    """From the policy: for what is done before a switch, and for the switch itself."""

    prepare_s: float = PolicyConfig.prepare_timeout_s
    switch_s: float = PolicyConfig.switch_timeout_s

    @classmethod
    def of(cls, policy: PolicyConfig) -> TransferLimits:
        return cls(prepare_s=policy.prepare_timeout_s, switch_s=policy.switch_timeout_s)

    def transfer_s(self, nbytes: int) -> float:
        """For `nbytes` of state."""
        return self.switch_s + nbytes / SLOWEST_BYTES_S


AWAIT_SWITCH_S = 3600.0
"""A prepared joiner waits so long for the boundary at which the switch happens: one step of the job at most,
but the coordinator, which sees both sides, gives up long before."""

RECOVERY_TIMEOUT_S = 3600.0
"""A rank that was stopped by somebody else's failure waits so long for what to do; then it ends. The
coordinator, which knows whom it waits for, gives up long before."""

PRIVATE_INTERVAL_S = 0.05
"""A rank without running statistics tells its private state at most so often; the steps in between can be
worked out by its successor."""
