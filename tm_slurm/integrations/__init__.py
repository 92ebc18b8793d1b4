"""Frameworks that own the training loop: PyTorch Lightning (`.lightning`) and Hugging Face's Trainer
(`.transformers`).

    def fit(role):                 # build the framework's trainer for this role, and have it train
        ...

    tm_slurm.integrations.run(fit, steps=1000)

Nothing here imports a framework; each is an extra (`pip install 'tm_slurm[lightning]'`, `[transformers]`).
"""

from tm_slurm.integrations.api import run
from tm_slurm.integrations.batches import StepBatches

__all__ = ["StepBatches", "run"]
