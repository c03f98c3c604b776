#!/usr/bin/env bash
# Several hosts without a scheduler: the same line on each of them.  runs/hosts.sh FIRST_HOST NODES GPUS [flags of train.py]
#     runs/hosts.sh node0 2 8 --data=data/mine --out=/shared/run --model=gpt2-medium --global_batch=384 --parallel=zero2
# Needs: the same code and data on every host and a folder --out that all of them see; port 29500 open on FIRST_HOST.
# NODES may be a range, 1:4: then a run goes on with those that are left when a host is lost, and takes it in again when it
# comes back; --global_batch must then divide among all numbers of ranks that may come (384: 8, 16, 24 or 32). FIRST_HOST holds the rendezvous and must stay. Every start resumes from the newest checkpoint.
# The line by hand, on two hosts (try it on one machine, with 127.0.0.1 and --nproc_per_node=1 in two shells):
#     TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --nproc_per_node=8 --max-restarts=3 --rdzv-id=run \
#         --rdzv-backend=c10d --rdzv-endpoint=node0:29500 train.py --resume ...
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 3 ] || { echo "error: three words are needed: runs/hosts.sh FIRST_HOST NODES GPUS [flags of train.py]" >&2; exit 2; }
first=$1 nodes=$2 gpus=$3
shift 3
# without it ranks that are started again may read the addresses of the dead ones from the store (torch 2.11 to 2.14)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec ${TORCHRUN:-torchrun} --nnodes="$nodes" --nproc_per_node="$gpus" --max-restarts="${RESTARTS:-3}" --rdzv-id="${ID:-winnow}" --rdzv-backend=c10d \
    --rdzv-endpoint="$first:${PORT:-29500}" --rdzv-conf="${RDZV_CONF:-last_call_timeout=30}" ${TORCHRUN_FLAGS:-} train.py --resume "$@"
