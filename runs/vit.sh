#!/usr/bin/env bash
# ViT fine-tuned on CIFAR (arXiv 2212.03597 section 4.4):  runs/vit.sh ARM [VIT_FOLDER] [flags]
#     ARM          baseline, ltd          VIT_FOLDER   config.json and model.safetensors of a ViT with patches of 16, as Hugging Face has them
# Needs: a GPU with 12 GB (an hour or two), and the images in DATA, scaled to 224 on the way:
#     python data_analyze.py --images=cifar-10-batches-py --out=data/cifar10
# Fourteen epochs of 391 batches of 128: 5,474 steps; `--plan` behind ARM shows the run without model, GPU or data. (The authors' count of
# layer-tokens is 305,784,192: over all 12 layers, of 32 rows, and K comes to 197 only after 3,982 steps.)
# The paper reports for ImageNet (batches of 256, a rate of 5e-5): 84.65 % dense, 84.70 % with token dropping at 77.7 % of the compute.
set -euo pipefail
cd "$(dirname "$0")/.."
arm=${1:-} folder=${2:-} steps=${STEPS:-5474} batch=${BATCH:-128}
shift $(($# < 1 ? $# : 1))
case "$folder" in --*|"") from="--model=vit-b16" ;; *) from="--init_from=$folder"; shift ;; esac
on_ltd="--ltd=32..197:$((steps * 3910 / 5474)) --ltd_multiple=8" on_cl=
usage="runs/vit.sh ltd vit_folder"
case $arm in baseline|ltd) ;; *) echo "error: ARM=$arm must be baseline or ltd: $usage" >&2; exit 2 ;; esac
. runs/gpt3_arms.sh
case " $* " in *" --plan "*) ;; *) launch=${LAUNCH:-${PYTHON:-python}}
    [ "$from" = "--init_from=$folder" ] || { echo "error: give the folder of the pretrained ViT: $usage" >&2; exit 2; } ;; esac
exec $launch train.py $from --data="${DATA:-data/cifar10}" --out="out/vit-$arm" --image_size=224 --global_batch=$batch --batch_size="${MICRO:-64}" --budget=steps \
    --train_tokens=$((steps * batch * 197)) --optimizer=sgd --learning_rate="${RATE:-1e-4}" --lr_decay=constant --warmup_tokens=0 --weight_decay=5e-4 \
    --eval_samples=0 --eval_interval=391 $flags "$@"
