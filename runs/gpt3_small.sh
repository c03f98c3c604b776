#!/usr/bin/env bash
# The smaller GPT-3 sizes with the ratios that the paper found to carry over between sizes:  runs/gpt3_small.sh SIZE ARM PERCENT [flags]
#     SIZE   125m, 350m, 760m      ARM   baseline, cl, ltd, both      PERCENT   of the full budget: 100, 67, 50
# Curricula last 40% of the baseline's steps, token dropping 70%; rows begin at a sixteenth of the context, kept tokens too;
# the peak rate is GPT-3's times 100 / PERCENT, for the baseline as well. TOKENS is the full budget (GPT-3's own: 300e9).
# Needs: GPUs (weights, gradients and AdamW's state are 2, 6 and 12 GB on each), and a store in DATA with difficulties for 2,048 tokens.
# The paper gives no table for these sizes; what is to be seen is the order of the arms at equal PERCENT.
set -euo pipefail
cd "$(dirname "$0")/.."
size=${1:-} arm=${2:-} percent=${3:-100}
shift $(($# < 3 ? $# : 3))
case $size in
    125m) lr=6e-4 batch=256 ;;
    350m) lr=3e-4 batch=256 ;;
    760m) lr=2.5e-4 batch=256 ;;
    2.7b) lr=1.6e-4 batch=512 ;;
    6.7b) lr=1.2e-4 batch=1024 ;;
    13b) lr=1e-4 batch=1024 ;;
    *) echo "error: SIZE=$size must be 125m, 350m, 760m, 2.7b, 6.7b or 13b: runs/gpt3_small.sh 125m both 100" >&2; exit 2 ;;
esac
[ "$percent" -ge 1 ] 2> /dev/null && [ "$percent" -le 100 ] || { echo "error: PERCENT=$percent must be a whole number from 1 to 100" >&2; exit 2; }
on_cl="--pool=voc:1%..100%:40%:sqrt --seqlen=truncate:6.25%..100%:40%" on_ltd="--ltd=6.25%..100%:70%"
usage="runs/gpt3_small.sh 125m both 100"
. runs/gpt3_arms.sh
number() { awk "BEGIN { printf \"%.6g\", $1 }"; }
exec $launch train.py --data="${DATA:-data/pile}" --out="out/gpt3_$size-$arm-$percent" --model="gpt3-$size" --global_batch=$batch --batch_size="${MICRO:-8}" \
    --train_tokens="$(number "${TOKENS:-300e9} * $percent / 100")" --learning_rate="$(number "$lr * 100 / $percent")" --min_lr="$(number "$lr / 10")" \
    --warmup_tokens=1% $flags "$@"
