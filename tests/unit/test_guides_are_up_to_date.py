"""What is generated into guides is what would be generated now, and every make target they name is there."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted(path for path in ROOT.glob("**/*.md") if not {".venv", "build"} & set(path.parts))


def test_the_list_of_tests_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "index.py")], capture_output=True, text=True, check=True
    )
    assert (ROOT / "tests" / "README.md").read_text() == made.stdout


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_guide_names_is_there(guide: Path) -> None:
    text = guide.read_text()
    for target in re.findall(r"(?:^|`| {4})make ([a-z][a-z-]*)", text, re.MULTILINE):
        known = subprocess.run(
            ["make", "--dry-run", "--no-print-directory", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert known.returncode == 0, f"{guide.name} names make {target}: {known.stderr}"
    for path in re.findall(r"\]\(([^):#]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        assert (guide.parent / path).exists(), f"{guide.name} links to {path}"


@pytest.mark.parametrize(
    "text", sorted((ROOT / "tm_slurm").glob("observe/pictures/*.msc")), ids=lambda path: path.name
)
def test_a_picture_says_what_its_text_says(text: Path) -> None:
    """It is drawn by `make pictures`; a program breaks long labels where it likes."""
    told = html.unescape(re.sub(r"<[^>]*>", " ", text.with_suffix(".svg").read_text()))
    words = "".join(told.split())
    labels = re.findall(r'label = "([^"]*)"', text.read_text())
    assert len(labels) > 10 and not [label for label in labels if "".join(label.split()) not in words]
