#!/usr/bin/env bash
# BERT-large on 1049B tokens and less (arXiv 2212.03597 section 4.2):  runs/bert_large.sh ARM PERCENT [flags]
#     ARM        baseline, cl (truncate + voc), ltd, both          PERCENT   100, 67 or 50 of 1049B layer-tokens
# Needs: GPUs with 24 GB or more (weights, gradients and AdamW's state are 5.4 GB on each), and a store of a large corpus in DATA with its
# difficulties for 512 tokens:
#     torchrun --nproc_per_node=8 data_analyze.py --text=PILE --out=data/pile_bert --tokenizer=bert_folder/vocab.txt --block_size=512
# `--plan` behind it shows the run without GPUs or data: 2,000,000 steps for baseline 100, about 2,715,000 for ltd 100 (the paper: 2.0M, 2.72M).
# Then fine-tune: python train.py --resume --out=out/bert_large-both-100 --export=bert.pt; runs/glue.sh bert.pt GLUE data/pile_bert/tokenizer.json
# The paper reports (GLUE, average of eight tasks): baseline 87.29, truncate + voc 87.60 with 1049B; ltd 87.32 with 524B.
set -euo pipefail
cd "$(dirname "$0")/.."
arm=${1:-} percent=${2:-100}
shift $(($# < 2 ? $# : 2))
case $percent in       # steps of a dense run, steps of the curriculum, peak rate (1e-4 times 100 / data in %)
    100) steps=2000000 cl=960000 lr=1e-4 ;;
    67) steps=1340000 cl=640000 lr=1.4925e-4 ;;
    50) steps=1000000 cl=480000 lr=2e-4 ;;
    *) echo "error: PERCENT=$percent must be 100, 67 or 50: runs/bert_large.sh both 100" >&2; exit 2 ;;
esac
on_cl="--pool=voc:5%..100%:$cl:sqrt --seqlen=truncate:128..512:$cl" on_ltd="--ltd=128..512:$steps"
usage="runs/bert_large.sh both 100"
. runs/gpt3_arms.sh
exec $launch train.py --data="${DATA:-data/pile_bert}" --out="out/bert_large-$arm-$percent" --model=bert-large --global_batch=1024 --batch_size="${MICRO:-16}" \
    --train_tokens=$((steps * 1024 * 512)) --learning_rate=$lr --min_lr=1e-5 --warmup_tokens=10000steps --lr_decay=linear --beta2=0.999 --weight_decay=0.01 \
    --dropout=0.1 $flags "$@"
