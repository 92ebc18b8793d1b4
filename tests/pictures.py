"""Makes the pictures of the README: `tm-slurm watch` and the report's from the recorded job, the flow of a
move and of a recovery from text (mscgen).

make pictures
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tm_slurm.observe.follow import JobFiles
from tm_slurm.observe.live import LiveJob
from tm_slurm.observe.report import report_of
from tm_slurm.observe.screen import screen

sys.path.insert(0, str(Path(__file__).parent / "unit"))

from recorded import RECORDED, TIMELINE

PICTURES = Path(__file__).parents[1] / "tm_slurm" / "observe" / "pictures"
WIDTH, HEIGHT = 88, 24


def watched() -> str:
    """The screen of `tm-slurm watch` when the last move was over, as SVG that needs no font."""
    last = max(number for number, entry in enumerate(TIMELINE) if entry["what"] == "downtime")
    at = max(entry["at"] for entry in TIMELINE[: last + 1])
    with tempfile.TemporaryDirectory() as directory:
        job = Path(shutil.copytree(RECORDED, Path(directory) / "job"))
        (job / "verdict.json").unlink()
        (job / "timeline.jsonl").write_text("".join(json.dumps(e) + "\n" for e in TIMELINE[: last + 1]))
        steps = [step for step in JobFiles(RECORDED).steps() if step["at"] <= at]
        (job / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        status = json.loads((job / "status.json").read_text())
        (job / "status.json").write_text(json.dumps({**status, "phase": "training", "at": at}))
        live = LiveJob(job)
        live.refresh()
    with tempfile.TemporaryFile("w") as nowhere:
        console = Console(
            width=WIDTH, record=True, force_terminal=True, color_system="truecolor", file=nowhere
        )
        console.print(screen(live, "1", width=WIDTH, height=HEIGHT, now=at))
        text = console.export_svg(title="tm-slurm watch 1", unique_id="watch")
    return re.sub(r"@font-face \{.*?\}", "", text, flags=re.DOTALL)


def drawn(text: Path) -> str:
    """The message sequence chart that a text describes, as SVG with a ground of its own: it is looked at on
    dark pages, too."""
    command = ["mscgen", "-T", "svg", "-i", str(text), "-o", "-"]
    svg = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    svg = re.sub(r' textLength="\d+"', "", svg).replace("Helvetica", "Helvetica, Arial, sans-serif")
    return re.sub(r"(<svg[^>]*>)", r'\1\n<rect width="100%" height="100%" fill="white"/>', svg, count=1)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "watch.svg").write_text(watched())
    for text in PICTURES.glob("*.msc"):
        text.with_suffix(".svg").write_text(drawn(text))
    for name, picture in report_of(JobFiles(RECORDED)).pictures.items():
        (PICTURES / f"{name}.png").write_bytes(picture)
    print(f"made: {', '.join(sorted(path.name for path in PICTURES.iterdir()))} in {PICTURES}")


if __name__ == "__main__":
    main()
