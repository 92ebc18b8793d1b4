"""From a configuration to a job in the queue, and from the batch script's first line to its last.

`submission` submits through submitit; `prepare` and `verdict` are the first and last line of every batch
script, `sbatch_templates/train.sbatch` included, and `step_watch` sees to it that the last one is reached;
`job_dir` makes and finds the job directory.
"""

from __future__ import annotations
