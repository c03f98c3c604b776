#!/usr/bin/env bash
# GPT-3 1.3B on 300B tokens and less (arXiv 2212.03597 section 4.1, table 3):  runs/gpt3_1.3b.sh ARM BILLIONS [flags]
#     ARM        baseline, cl (truncate + voc), ltd, both          BILLIONS   300, 200 or 150 layer-tokens
# Needs: a cluster of GPUs with 40 GB or more (weights, gradients and AdamW's state are 21 GB on each; 300B tokens are 2.3e21 FLOPs),
# and a store of a large corpus in DATA (the paper: the Pile) with its difficulties:
#     torchrun --nproc_per_node=8 data_analyze.py --text=PILE --out=data/pile --tokenizer=gpt2 --block_size=2048
# `--plan` behind it shows the run without GPUs or data.
# The paper reports (average of 19 tasks, zero-shot / ten-shot): 300B: baseline 42.5 / 44.0, cl 43.6 / 44.9, ltd 43.7 / 44.9,
# both 43.8 / 45.1; 150B: baseline 42.0 / 42.7, cl 42.6 / 43.7, ltd 42.7 / 43.5, both 42.8 / 44.0.
set -euo pipefail
cd "$(dirname "$0")/.."
arm=${1:-} billions=${2:-300}
shift $(($# < 2 ? $# : 2))
case $billions in       # steps of the curriculum, steps of token dropping, peak rate (2e-4 times 100 / data in %)
    300) cl=110000 ltd=200000 lr=2e-4 ;;
    200) cl=73000 ltd=133333 lr=3e-4 ;;
    150) cl=55000 ltd=100000 lr=4e-4 ;;
    *) echo "error: BILLIONS=$billions must be 300, 200 or 150: runs/gpt3_1.3b.sh both 300" >&2; exit 2 ;;
esac
on_cl="--pool=voc:1%..100%:$cl:sqrt --seqlen=truncate:80..2048:$cl" on_ltd="--ltd=128..2048:$ltd"
usage="runs/gpt3_1.3b.sh both 300"
. runs/gpt3_arms.sh
exec $launch train.py --data="${DATA:-data/pile}" --out="out/gpt3_1.3b-$arm-$billions" --model=gpt3-1.3b --global_batch=512 --batch_size="${MICRO:-8}" \
    --train_tokens="${billions}e9" --learning_rate=$lr --min_lr=1e-6 --warmup_tokens=3e9 --recompute=block $flags "$@"
