"""The commands of the guides, as they stand there, and by what each is run.

A command is a line of a block that is indented by four spaces, or text in backticks of two words or more that
begins with a program. Words in capitals stand for what a reader puts there.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = [
    "README.md",
    "CONTRIBUTING.md",
    "configs/README.md",
    "sbatch_templates/README.md",
    "spank/README.md",
    "tests/README.md",
    "tm_slurm/events/README.md",
]
PROGRAMS = frozenset(
    {
        *(
            "apt-get",
            "df",
            "eval",
            "export",
            "make",
            "pip",
            "py-spy",
            "pytest",
            "python",
            "python3",
            "sbatch",
            "scancel",
            "until",
        ),
        *("scontrol", "source", "squeue", "sudo", "systemctl", "tm-slurm", ".venv/bin/python"),
    }
)
_NO_COMMAND = re.compile(r"\d\d:\d\d:\d\d ")
"""A line of a log."""

_OPTION_ALONE = re.compile(r"(sbatch|salloc|srun|strigger|python3?) -\S+")
"""`sbatch --constraint`: about an option."""

_SUBCOMMAND_ALONE = re.compile(r"tm-slurm [a-z-]+|scontrol reboot ASAP")
"""`tm-slurm events`: the name of a command; each is run by the tests of the command line."""


def of_guide(text: str) -> list[str]:
    """The commands of a guide in Markdown, without their remarks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r" \\\n +", " ", prose)
    found = []
    for line in re.findall(r"^    (\S.*)$", prose, re.MULTILINE):
        if not _NO_COMMAND.match(line):
            found.append(re.sub(r"\s+# .*", "", line))
    spans = re.findall(
        r"`([^`]+)`", re.sub(r"\s*\n\s*", " ", re.sub(r"^    .*$", "", prose, flags=re.MULTILINE))
    )
    for span in spans:
        words = span.split()
        is_about = _OPTION_ALONE.fullmatch(span) or _SUBCOMMAND_ALONE.fullmatch(span) or "…" in span
        if len(words) > 1 and words[0] in PROGRAMS and (not is_about or span in BY_TEST):
            found.append(span)
    return found


ON_A_CLUSTER = [
    "until tm-slurm status | grep -q training; do sleep 1; done",
    "tm-slurm submit configs/char_gpt.yaml",
    "tm-slurm status",
    "tm-slurm status JOB",
    "tm-slurm status 1",
    "tm-slurm events JOB",
    "tm-slurm standbys",
    'squeue -o "%i %T %k"',
    "squeue --me",
    "tm-slurm migrate 1234 --node n3",
    "tm-slurm migrate JOB --node n3",
    "tm-slurm migrate --node n3",
    "tm-slurm cancel-move --node n3",
    "scontrol update nodename=n3 state=drain reason=disk",
    "scontrol update nodename=n3 state=resume",
    "scontrol create reservation reservationname=fans flags=maint,ignore_jobs nodes=n[3-4] "
    "starttime=2030-05-02T08:00:00 duration=120 users=root",
    "scontrol delete reservationname=fans",
    "tm-slurm watch JOB",
    "tm-slurm watch 1",
    "tm-slurm events --follow",
    "tm-slurm events -f",
    "scancel 1234",
    "tm-slurm report",
    "tm-slurm report JOB",
    "tm-slurm report 1",
    "tm-slurm report JOB --json",
    "tm-slurm timeline JOB --format chrome -o trace.json",
]
"""Run as they stand, with the job's id and the nodes put in, by test_the_commands_of_the_guides.py."""

HERE = [
    'eval "$(tm-slurm completion bash)"',
    "tm-slurm plan --gpus 16384",
    "tm-slurm install --print",
    "python -m tm_slurm.config.reference > configs/README.md",
    "python tests/index.py > tests/README.md",
    "tm-slurm submit --dry-run",
]
"""Run as they stand, in a copy of the checkout, by test_every_command_of_the_guides_is_run.py."""

BY_TEST = {
    "tm-slurm --help": "unit/test_the_command_line_is_quick_and_polite.py::test_it_answers_at_once",
    "tm-slurm COMMAND --help": (
        "unit/test_the_command_line_is_quick_and_polite.py::test_help_has_an_example_and_keeps_to_80_columns"
    ),
    "python train.py": "slurm/test_the_readme_is_true.py::test_the_script_runs_in_one_process",
    "tm-slurm submit config.yaml": "slurm/test_the_readme_is_true.py::test_the_script_runs_as_a_job",
    "sbatch --job-name=linear --time=60 sbatch_templates/train.sbatch config.yaml": (
        "slurm/test_submit_from_anywhere_and_again.py::test_a_template_job_submitted_from_inside_another_one"
    ),
    "sbatch sbatch_templates/train.sbatch": (
        "slurm/test_submit_from_anywhere_and_again.py::test_a_template_job_submitted_from_inside_another_one"
    ),
    "sbatch sbatch_templates/train.sbatch configs/char_gpt.yaml": (
        "slurm/test_submit_from_anywhere_and_again.py::test_a_template_job_submitted_from_inside_another_one"
    ),
    "sbatch --nodes=5 sbatch_templates/train.sbatch configs/char_gpt.yaml train.steps=50": (
        "slurm/test_submit_from_anywhere_and_again.py::test_a_job_with_too_few_nodes_ends_at_once_and_says_why"
    ),
    "tm-slurm submit --launch allocation": (
        "slurm/test_every_node_of_an_allocation_can_be_given_back.py::test_all_six_nodes_are_drained_one_after_another"
    ),
    "tm-slurm submit --launch allocation configs/char_gpt.yaml": (
        "slurm/test_every_node_of_an_allocation_can_be_given_back.py::test_all_six_nodes_are_drained_one_after_another"
    ),
    "sbatch sbatch_templates/controller.sbatch configs/char_gpt.yaml": (
        "slurm/test_every_node_of_an_allocation_can_be_given_back.py::test_the_template_and_a_shell_control_a_job_as_well"
    ),
    "python3 -m tm_slurm.submit.controller configs/char_gpt.yaml": (
        "slurm/test_every_node_of_an_allocation_can_be_given_back.py::test_the_template_and_a_shell_control_a_job_as_well"
    ),
    "python3 -m tm_slurm.submit.controller JOB_DIRECTORY": (
        "slurm/test_every_node_of_an_allocation_can_be_given_back.py::test_a_controller_that_is_lost_is_missed_by_nobody"
    ),
    "tm-slurm submit configs/lightning_gpt.yaml": (
        "slurm/test_a_framework_owns_the_loop.py::test_a_job_of_a_framework_moves_and_survives"
    ),
    "tm-slurm submit configs/transformers_gpt.yaml": (
        "slurm/test_a_framework_owns_the_loop.py::test_a_job_of_a_framework_moves_and_survives"
    ),
    "tm-slurm submit configs/own_loop.yaml": (
        "slurm/test_a_framework_owns_the_loop.py::test_a_loop_of_ones_own_moves"
    ),
    "scontrol reboot ASAP n3": (
        "slurm/test_maintenance_windows.py::test_a_node_that_is_asked_to_reboot_is_left_and_given_back"
    ),
    "scontrol update jobid=1234 starttime=now": (
        "slurm/test_submit_from_anywhere_and_again.py::test_a_requeued_job_starts_again_in_its_directory"
    ),
    "tm-slurm plan --gpus 512 --job 1234 --repair 2": (
        "unit/test_the_plan_command.py::test_a_job_tells_its_own_failures_and_downtimes"
    ),
    "tm-slurm plan --gpus 4096 --sacct-days 90": "unit/test_the_plan_command.py::test_sacct_itself_is_asked",
    "tm-slurm cluster up": "slurm/test_local_cluster_command.py::test_a_cluster_from_up_to_down",
    "tm-slurm cluster run -- sinfo": "slurm/test_local_cluster_command.py::test_a_cluster_from_up_to_down",
    "tm-slurm cluster down": "slurm/test_local_cluster_command.py::test_a_cluster_from_up_to_down",
    "tm-slurm cluster power-off n3": "slurm/test_local_cluster_command.py::test_a_cluster_from_up_to_down",
    "tm-slurm cluster freeze n3": "slurm/test_local_cluster_command.py::test_a_cluster_from_up_to_down",
    "scancel --signal=USR2 1234": (
        "slurm/test_state_without_a_replica.py::test_a_job_whose_time_is_over_goes_on_from_its_checkpoint"
    ),
    "scontrol requeue 1234": (
        "slurm/test_submit_from_anywhere_and_again.py::test_a_requeued_job_starts_again_in_its_directory"
    ),
    "scancel --signal=KILL 1234": (
        "slurm/test_slurm_is_asked_for_another_node.py"
        "::test_a_job_that_is_killed_before_any_node_has_come_leaves_nothing_in_the_queue"
    ),
    "tm-slurm doctor --directory /shared/jobs": (
        "slurm/test_doctor_examines_a_real_cluster.py::test_a_healthy_cluster_has_no_failure"
    ),
    "tm-slurm install --prefix /usr/local": (
        "slurm/test_spank_options_reach_the_job.py::test_install_shows_what_is_there_and_uninstall_removes_it"
    ),
    "make install": (
        "slurm/test_spank_options_reach_the_job.py::test_install_shows_what_is_there_and_uninstall_removes_it"
    ),
    "sudo make -C spank install PREFIX=/usr/local": (
        "slurm/test_spank_options_reach_the_job.py::test_install_shows_what_is_there_and_uninstall_removes_it"
    ),
    "make uninstall": (
        "slurm/test_spank_options_reach_the_job.py::test_install_shows_what_is_there_and_uninstall_removes_it"
    ),
    "make spank": "slurm/test_spank_options_reach_the_job.py::test_only_what_slurm_calls_is_exported",
    "make -C spank": "slurm/test_spank_options_reach_the_job.py::test_only_what_slurm_calls_is_exported",
    "make -C spank check": "slurm/test_spank_options_reach_the_job.py::test_the_c_parts_do_as_they_say",
}
"""Run in the same way by a test, with a job or names of its own."""

NOT_RUN = {
    "make demo": "it is the demonstration itself: minutes, and what it does is what tests/slurm does",
    "make frameworks": "`make test` has run it",
    "make setup": "what runs the tests has run it",
    "make test": "it is what runs the tests",
    "make test-next": "minutes; `make test` has run that part of it which shows what differs",
    "make test-unit": "it is what runs the tests",
    "make test-layouts": "minutes; by hand after a change to the layouts",
    "make lint": "a check of its own",
    "make clean": "it would remove what runs the tests",
    "make record": "it makes a file anew that the tests read",
    "make pictures": "it makes pictures anew that are looked at",
    "make tables": "it makes tables anew that test_the_figures_in_the_readme_are_recorded.py compares",
    "make sanitize": "minutes; by hand after a change to the native parts",
    "make -C spank sanitize": "minutes; by hand after a change to the native parts",
    "make chaos": "minutes to hours; tests/chaos/test_chaos.py plays a few seeds",
    "make chaos SEEDS=5": "minutes; tests/chaos/test_chaos.py plays a few seeds",
    "make chaos SEEDS=20": "minutes; tests/chaos/test_chaos.py plays a few seeds",
    "make bench-baselines": "a measurement: it takes hours",
    "make bench-cli": "a measurement: it needs a machine of its own",
    "make bench-downtime": "a measurement: it needs a machine of its own",
    "make bench-ettr": "a measurement: it needs a machine of its own",
    "make bench-overhead": "a measurement: it needs a machine of its own",
    "make bench-scale": "a measurement: it needs a machine of its own",
    "make bench-slurm": "a measurement: it needs a machine of its own",
    "make bench-warmup": "a measurement: it needs a machine of its own",
    "pytest tests/slurm/test_spank_*.py": "it is what runs the tests",
    ".venv/bin/python -m pytest tests/comm": "it is what runs the tests",
    ".venv/bin/python -m pytest tests/slurm -k drained": "it is what runs the tests",
    "source .venv/bin/activate": "it changes the shell of whoever types it",
    'pip install torch==2.13.0 "setuptools>=77" wheel ninja': "the Makefile has run it",
    "pip install --no-build-isolation .": "the Makefile has run it, with -e",
    "pip install --no-build-isolation '.[lightning]'": "the Makefile has installed the same for the tests",
    "apt-get install gcc make libssl-dev libslurm-dev": "the Makefile has run it",
    "py-spy dump --native --pid PID": "of another project, and not installed here",
    "py-spy dump --pid PID": "of another project, and not installed here",
    "export SLURM_CONF=/var/lib/tm_slurm/local/slurm.conf": "clusters of tests have names of their own",
    "df -h DIRECTORY": "of the system",
    "systemctl status slurmd": "of the system; the local cluster has no systemd",
}
"""With the reason. Every target of make is looked up by test_guides_are_up_to_date.py."""
