module load cuda
export WHO="$USER"
unset SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_TRES_PER_TASK
job_dir='/scratch/it'"'"'s $HOME/7/run `x`'
export TM_SLURM_EVENTS_TO="$job_dir"
python='/opt/my python/bin/python3'
step_options=(--nodes=3 --ntasks=3 --ntasks-per-node=1 --cpus-per-task=6 --no-kill --kill-on-bad-exit=0 --wait=0 --overlap --export=ALL --mpi=none --gpus-per-node=2 '--output=/scratch/it'"'"'s $HOME/7/run `x`/logs/step-%j-%N.log')
"$python" -m tm_slurm.submit.step_watch "$job_dir" $$ </dev/null & disown
