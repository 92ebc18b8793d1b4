#!/bin/bash

# Parameters
#SBATCH --cpus-per-task=1
#SBATCH --job-name=char_gpt
#SBATCH --no-kill
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/home/user/run/tm-slurm-jobs/.submitit-USER/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=30

# setup
tm_slurm_start=$(/opt/venv/bin/python3 -m tm_slurm.submit.prepare --submitted /home/user/run/tm-slurm-jobs/%j 0123456789abcdef) || exit 2
eval "$tm_slurm_start"

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /home/user/run/tm-slurm-jobs/.submitit-USER/%j_%t_log.out --nodes=6 --ntasks=6 --ntasks-per-node=1 --cpus-per-task=1 --no-kill --kill-on-bad-exit=0 --wait=0 --overlap --export=ALL --mpi=none /opt/venv/bin/python3 -u -m submitit.core._submit /home/user/run/tm-slurm-jobs/.submitit-USER


# teardown
trap '' TERM
/opt/venv/bin/python3 -m tm_slurm.submit.verdict "$job_dir"