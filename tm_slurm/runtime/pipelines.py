"""What a step that was broken off leaves behind in torch's pipeline schedules."""

from __future__ import annotations

import gc
import sys


def forget_broken_step() -> None:
    """Empty the losses of micro-batches that a schedule's last stage has kept: it drops them at the end of a
    step alone, so that the same step, done again, would go back through the graphs of its first try.

    Schedules are found wherever the user keeps them. Costs nothing where there are no pipelines.
    """
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is None:
        return
    for each in gc.get_objects():
        if issubclass(type(each), schedules._PipelineSchedule):
            each._internal_losses.clear()
