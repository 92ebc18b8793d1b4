#!/bin/bash

# Parameters
#SBATCH --account='a;b'
#SBATCH --constraint='[rack1|rack2]'
#SBATCH --cpus-per-task=6
#SBATCH --exclude='n[1-2]'
#SBATCH --exclusive
#SBATCH --gpus-per-node=2
#SBATCH --job-name='$(reboot) "two words" '"'"'quoted'"'"' \'
#SBATCH --mail-user='me <me@example.org>'
#SBATCH --mem=16000M
#SBATCH --nice=5
#SBATCH --no-kill
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/scratch/it'"'"'s $HOME/.submitit-USER/%j_0_log.out'
#SBATCH --partition='gpu queue'
#SBATCH --requeue
#SBATCH --reservation='maint $HOME'
#SBATCH --signal=USR2@300
#SBATCH --time=UNLIMITED

# setup
module load cuda
export WHO="$USER"
tm_slurm_start=$('/opt/my python/bin/python3' -m tm_slurm.submit.prepare --submitted '/scratch/it'"'"'s $HOME/%j/run `x`' 0123456789abcdef) || exit 2
eval "$tm_slurm_start"

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output '/scratch/it'"'"'s $HOME/.submitit-USER/%j_%t_log.out' --nodes=3 --ntasks=3 --ntasks-per-node=1 --cpus-per-task=6 --no-kill --kill-on-bad-exit=0 --wait=0 --overlap --export=ALL --mpi=none --gpus-per-node=2 '/opt/my python/bin/python3' -u -m submitit.core._submit '/scratch/it'"'"'s $HOME/.submitit-USER'


# teardown
trap '' TERM
'/opt/my python/bin/python3' -m tm_slurm.submit.verdict "$job_dir"