"""The sandbox (TrainMover §4): a standby warms up alone, no call leaves the process."""

from tm_slurm.sandbox.groups import forget_groups, forget_role, import_what_comes_late
from tm_slurm.sandbox.imitation import Shape, shape_of
from tm_slurm.sandbox.recorder import Recorder
from tm_slurm.sandbox.recording import Call, Recording, layout_of
from tm_slurm.sandbox.role_class import role_class_of
from tm_slurm.sandbox.sandbox import Answers, Sandbox, least_steps, shadow_steps_of_another_role
from tm_slurm.sandbox.store import RecordingError, find, recordings_of, roles_of

__all__ = [
    "Answers",
    "Call",
    "Recorder",
    "Recording",
    "RecordingError",
    "Sandbox",
    "Shape",
    "find",
    "forget_groups",
    "forget_role",
    "import_what_comes_late",
    "layout_of",
    "least_steps",
    "recordings_of",
    "role_class_of",
    "roles_of",
    "shadow_steps_of_another_role",
    "shape_of",
]
