"""A plan as a picture; needs matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path

from tm_slurm.cli.failures import UserMistake
from tm_slurm.planning.sizing import Plan


def draw(plan: Plan, path: Path) -> None:
    """Write a PNG of the GPU hours wasted a week by number of standbys."""
    try:
        import matplotlib
    except ImportError:
        raise UserMistake("--png needs matplotlib: pip install 'tm_slurm[report]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.0, 4.5), layout="constrained")
    numbers = [one.standbys or 0 for one in plan.standbys]
    stopped = [one.stopped_gpu_h for one in plan.standbys]
    axes.bar(numbers, stopped, label="training stands still", color="#2b6cb0")
    axes.bar(
        numbers,
        [one.waiting_gpu_h for one in plan.standbys],
        bottom=stopped,
        label="standbys wait",
        color="#a0c4e8",
    )
    axes.axhline(plan.restart.wasted_gpu_h, color="#c05621", label="restarts", linestyle="--")
    axes.set_xlabel("standbys")
    axes.set_ylabel("GPU hours wasted a week")
    axes.set_title(f"{plan.inputs.gpus:,} GPUs, MTTF {plan.inputs.mttf_h:.3g} h")
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise UserMistake(f"--png {path}: {error.strerror}") from None
    finally:
        pyplot.close(figure)
