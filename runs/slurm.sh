#!/usr/bin/env bash
#SBATCH --job-name=winnow
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
# Under slurm:  sbatch runs/slurm.sh --data=data/mine --out=/shared/run --model=gpt2-xl --global_batch=384 --parallel=zero2
# Two minutes before the time is over, and when the job is preempted, SIGTERM reaches this script and is handed on: the
# ranks save after the step under way and end, and the job is queued again, to resume there. torchrun gives its ranks 30 s
# for that: take --ckpt_async, or more ranks with smaller shards, where a checkpoint takes longer. Not tried on a cluster.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
export ID=$SLURM_JOB_ID PORT=$((20000 + SLURM_JOB_ID % 20000))
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 runs/hosts.sh "$first" "$SLURM_JOB_NUM_NODES" "${SLURM_GPUS_ON_NODE:-8}" "$@" &
step=$! told=
trap 'told=1; kill -TERM $step' TERM
code=0
wait $step || code=$?
if [ -n "$told" ]; then         # the first wait ended with the signal
    wait $step || true
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
