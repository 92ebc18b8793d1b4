unset SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_TRES_PER_TASK
job_dir=/home/user/run/jobs/7
export TM_SLURM_EVENTS_TO="$job_dir"
python=/opt/venv/bin/python3
step_options=(--nodes=6 --ntasks=6 --ntasks-per-node=1 --cpus-per-task=1 --no-kill --kill-on-bad-exit=0 --wait=0 --overlap --export=ALL --mpi=none --output=/home/user/run/jobs/7/logs/step-%j-%N.log)
"$python" -m tm_slurm.submit.step_watch "$job_dir" $$ </dev/null & disown
