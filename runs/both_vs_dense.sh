#!/usr/bin/env bash
# Both techniques together against dense training, at the same layer-tokens (the table at the top of the README).
# Needs: 2 CPU cores, the embedded corpus, about an hour. 2 arms x 3 learning rates x 3 seeds of 2M layer-tokens.
# Finished runs are not run again. Then:  python bench.py table out/both_vs_dense/*
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=${OUT:-out/both_vs_dense}
[ -f data/stdlib/meta.json ] || $python data_analyze.py

for seed in 1 2 3; do
    for run in dense:1e-3 dense:2e-3 dense:4e-3 both:2e-3 both:4e-3 both:8e-3; do      # the best rate of each arm lies inside
        arm=${run%:*} lr=${run#*:} off=""
        [ $arm = dense ] && off="--pool=off --seqlen=off --ltd=off"
        # the floor of the decay is a tenth of the peak, for every arm; all validation windows
        echo "--out=$out/$arm-lr$lr-s$seed --learning_rate=$lr --min_lr=$(awk "BEGIN { print $lr / 10 }") --seed=$seed --eval_samples=0 $off"
    done
done | OMP_NUM_THREADS=1 xargs -P "${JOBS:-2}" -I{} sh -c "$python train.py --train_tokens=2000000 --save_interval=100 --keep_ckpts=1 --resume {} > /dev/null || exit 255"
