"""The demo (`make demo`): a real GPT on a real Slurm cluster on this machine, drained twice, ending as if
undisturbed."""
