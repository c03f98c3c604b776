#!/usr/bin/env bash
# GPT-2 medium on Penn Treebank, or any text (arXiv 2212.03597 section 4.3):  runs/finetune_gpt2.sh ARM [GPT2_FOLDER] [flags]
#     ARM           baseline, cl (rows cut into pieces), ltd, both; example22 and example20, of the authors' example (two epochs' budget, K
#                   growing over 400 steps, 22 or 20 layers dropping): 687 and 672 steps of two micro-batches of 2 rows (theirs: 1373 and 1344
#                   micro-steps with 2,147,024 and 2,148,032 layer-tokens)
#     GPT2_FOLDER   config.json and model.safetensors of gpt2-medium, as Hugging Face has them
# Needs: a GPU with 12 GB (minutes), and the text in DATA, with GPT-2's vocabulary:
#     python data_analyze.py --text=ptb.train.txt --out=data/ptb --tokenizer=gpt2 --metric=
# Five epochs of 262 batches of 4 rows; `--plan` behind ARM shows the run without model, GPU or data (another text: EPOCH is its batches of 4,096 tokens).
# The paper reports, at the same layer-tokens, a perplexity of 16.11 dense and 15.9 with both.
set -euo pipefail
cd "$(dirname "$0")/.."
arm=${1:-} name=${1:-} folder=${2:-}
shift $(($# < 1 ? $# : 1))
case "$folder" in --*|"") from="--model=gpt2-medium --bias=True --gelu=tanh" ;; *) from="--init_from=$folder"; shift ;; esac
on_cl="--pool=off --seqlen=reshape:32..1024:$([ "$arm" = both ] && echo 131 || echo 917)" on_ltd="--ltd=128..1024:393 --ltd_multiple=8"
usage="runs/finetune_gpt2.sh both gpt2_medium_folder"
epochs=5
case $arm in
    example22) arm=ltd epochs=2 on_ltd="--ltd=128..1024:400 --ltd_multiple=8" ;;
    example20) arm=ltd epochs=2 on_ltd="--ltd=128..1024:400 --ltd_multiple=8 --ltd_dense=2,2" ;;
esac
. runs/gpt3_arms.sh
case " $* " in *" --plan "*) ;; *) launch=${LAUNCH:-${PYTHON:-python}}
    [ "$from" = "--init_from=$folder" ] || { echo "error: give the folder of gpt2-medium: $usage" >&2; exit 2; } ;; esac
exec $launch train.py $from --data="${DATA:-data/ptb}" --out="out/ptb-$name" --global_batch=4 --batch_size=4 --train_tokens=$((epochs * ${EPOCH:-262} * 4 * 1024)) \
    --learning_rate=1e-4 --min_lr=0 --warmup_tokens=0 --lr_decay=linear --weight_decay=0 --beta2=0.999 --dropout=0.1 --eval_samples=0 --eval_interval=262 $flags "$@"
