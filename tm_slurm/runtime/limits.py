"""How long anything here may wait, in seconds."""

HANDSHAKE_TIMEOUT_S = 5.0
PREPARE_TIMEOUT_S = 120.0
SWITCH_TIMEOUT_S = 60.0

AWAIT_SWITCH_S = 3600.0
"""A prepared joiner waits so long for the boundary at which the switch happens: one step of the job at most,
but the coordinator, which sees both sides, gives up long before."""

RECOVERY_TIMEOUT_S = 3600.0
"""A rank that was stopped by somebody else's failure waits so long for what to do; then it ends. The
coordinator, which knows whom it waits for, gives up long before."""

PRIVATE_INTERVAL_S = 0.05
"""A rank without running statistics tells its private state at most so often; the steps in between can be
worked out by its successor."""

FETCH_TIMEOUT_S = 60.0
"""A snapshot must have come from a vault within this."""
