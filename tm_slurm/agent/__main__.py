"""`python -m tm_slurm.agent --job-dir DIR`."""

from __future__ import annotations

import argparse
import sys

from tm_slurm.agent.main import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tm_slurm.agent", description=__doc__)
    parser.add_argument(
        "--job-dir", required=True, help="the job directory, on a file system that all nodes share"
    )
    return run(parser.parse_args().job_dir)


if __name__ == "__main__":
    sys.exit(main())
