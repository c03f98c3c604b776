#!/usr/bin/env bash
# The paper's ablations (arXiv 2212.03597 tables 3 to 5, 2211.11586 section 4) on the embedded corpus, at equal layer-tokens.
# Needs: 2 CPU cores and about an hour, or a GPU (JOBS=1, SIZE, TOKENS and DATA as large as you like). Every arm is
# swept over four learning rates with one seed and the two best of them with three, decays fully inside its own budget, and
# is paired with dense by seed; the headline arms have five seeds at their best rate. Finished runs are not run again, interrupted ones go on.
#
#     runs/ablation.sh             all of it, then the tables (out/ablation/table.md, match.md, *.png)
#     runs/ablation.sh --quick     every arm at a toy size, one rate and seed, in minutes: to see that it works
#     runs/ablation.sh bert        dense, LTD, a pool by length and both, of masked language models over paragraphs of the same text
#     runs/ablation.sh vit         dense and LTD, of classifiers of drawn images
#
# What the paper reports, for its models: token dropping and curricula beat dense training at the same layer-tokens, both
# together are best; a growing K beats a constant one, a fresh draw a layer beats one draw for all, dense ends are needed,
# a rate by layer-tokens beats one by steps, random dropping beats TokenBypass on GPT.
set -euo pipefail
cd "$(dirname "$0")/.."
die() { echo "error: $1" >&2; exit 2; }
python=${PYTHON:-python} out=${OUT:-out/ablation} jobs=${JOBS:-2}
size=${SIZE:---n_layer=6 --n_head=4 --n_embd=64 --block_size=128} tokens=${TOKENS:-400000}
data=${DATA:-data/stdlib_bytes}         # Python's standard library, byte by byte: a small vocabulary for a small model
rates=${RATES:-1e-3 2e-3 4e-3 8e-3} seeds=${SEEDS:-1 2 3} more=${MORE-4 5} budgets=${BUDGETS-50 67}
evals="--eval_samples=512 --eval_interval=50 --max_new_tokens=1" kind=${1:-} arms=
case "$kind" in
    "") ;;
    bert) out=${OUT:-out/ablation_bert} size=${SIZE:---arch=bert --pos=rotary --samples=document --n_layer=6 --n_head=4 --n_embd=64 --block_size=128}
        tokens=${TOKENS:-1000000} data=${DATA:-data/stdlib_paragraphs} rates=${RATES:-2e-3 4e-3 8e-3} more=${MORE-} budgets=${BUDGETS-}
        arms="dense ltd seqlen seqlen_ltd" evals="--eval_samples=1024 --eval_interval=100" ;;
    vit) out=${OUT:-out/ablation_vit} size=${SIZE:---model=vit-tiny --global_batch=32 --batch_size=32} tokens=${TOKENS:-2000000} data=${DATA:-data/shapes}
        rates=${RATES:-1e-3 2e-3 4e-3 8e-3} more=${MORE-} budgets=${BUDGETS-} arms="dense ltd" evals="--eval_samples=0 --eval_interval=400" ;;
    --quick) out=${OUT:-out/ablation_quick} size="--n_layer=4 --n_head=2 --n_embd=16 --block_size=32" tokens=6000 rates=4e-3 seeds=1 more="" budgets=50 ;;
    *) die "$1 is unknown; it takes --quick, bert, vit or nothing (OUT, DATA, SIZE, TOKENS, RATES, SEEDS, MORE, BUDGETS, ARMS in the environment)" ;;
esac
block=$(echo "$size" | grep -o "block_size=[0-9]*" | cut -d= -f2) || [ "$kind" = vit ] || die "SIZE=$size must name a --block_size=N"
case "$out$data" in *" "*) die "OUT and DATA must be without blanks" ;; esac
[ -d "$data" ] || [ -z "${DATA:-}" ] || [ "${1:-}" = --quick ] || die "DATA=$data is no folder; make it with: python data_analyze.py --text=... --out=$data"
case "$kind" in
    vit) [ -d "$data" ] || $python data_analyze.py --images=shapes --out="$data" ;;
    bert) [ -d "$data" ] || $python data_analyze.py --tokenizer=bytes --split=paragraph --out="$data" --metric=
        [ -f "$data/T$block-documents/seqlen.json" ] || $python data_analyze.py --data="$data" --block_size="$block" --samples=document --metric=seqlen ;;
    *) [ -d "$data" ] || $python data_analyze.py --tokenizer=bytes --out="$data" --metric=
        [ -f "$data/T$block/voc.json" ] || $python data_analyze.py --data="$data" --block_size="$block" ;;
esac
mkdir -p "$out"
settings="$size $tokens $data"
[ ! -f "$out/settings.txt" ] || [ "$(cat "$out/settings.txt")" = "$settings" ] || die "$out holds runs of other settings ($(cat "$out/settings.txt")); take another OUT"
echo "$settings" > "$out/settings.txt"

off="--pool=off --seqlen=off" cl="--pool=voc:30%..100%:40%:sqrt" len="25%..100%:40%" ltd="--ltd=25%..100%:70%"
block=${block:-65} third=$((tokens / (16 * block) * 40 / 300))     # levels that divide the block: reshape pads nothing. 16: samples a step
levels="$((block / 4))..$block:$((3 * third)):$((block / 4))@$third,$((block / 2))@$((2 * third))"
arm() {         # the flags of an arm; the defaults are voc + truncate + LTD
    case $1 in
        dense)        echo "$off --ltd=off" ;;
        ramp)         echo "--pool=off --seqlen=truncate:$len $ltd --batch_ramp" ;;    # as many updates as truncate + LTD
        truncate)     echo "--pool=off --seqlen=truncate:$len --ltd=off" ;;
        reshape)      echo "--pool=off --seqlen=reshape:$levels --ltd=off" ;;
        voc)          echo "$cl --seqlen=off --ltd=off" ;;
        hard)         echo "$cl --pool_order=hard_first --seqlen=off --ltd=off" ;;
        random)       echo "$cl --pool_order=random --seqlen=off --ltd=off" ;;
        voc_truncate) echo "$cl --seqlen=truncate:$len --ltd=off" ;;
        voc_reshape)  echo "$cl --seqlen=reshape:$levels --ltd=off" ;;
        ltd)          echo "$off $ltd" ;;
        seqlen)       echo "--pool=seqlen:30%..100%:40%:sqrt --seqlen=off --ltd=off" ;;     # these two need --samples=document
        seqlen_ltd)   echo "--pool=seqlen:30%..100%:40%:sqrt --seqlen=off $ltd" ;;
        constant)     echo "$off --ltd=75%..75%:0" ;;     # about the mean of the growing K over its run (NOTES.md)
        once)         echo "$off $ltd --ltd_redraw=once" ;;
        no_ends)      echo "$off $ltd --ltd_dense=none" ;;
        bypass)       echo "$off $ltd --ltd_choice=importance" ;;
        ltd_steps)    echo "$off $ltd --lr_unit=steps" ;;
        all)          echo "$cl --seqlen=truncate:$len $ltd" ;;
        moe)          echo "$off --ltd=off --n_expert=8" ;;     # these two only if ARMS names them
        moe_ltd)      echo "$off $ltd --n_expert=8" ;;
        all_steps)    echo "$cl --seqlen=truncate:$len $ltd --lr_unit=steps" ;;
        *) die "ARMS: $1 is no arm" ;;
    esac
}
arms=${ARMS:-${arms:-"dense all ltd voc_truncate truncate voc reshape voc_reshape ramp constant once no_ends bypass ltd_steps all_steps hard random"}}
for a in $arms; do arm "$a" > /dev/null; done
line() {        # arm, rate, seed, budget -> the command of one run; the floor of the decay is a tenth of the peak
    local floor flags
    floor=$(awk "BEGIN { print $2 / 10 }") flags=$(arm "$1")
    echo "--out=$out/$1-lr$2-s$3-b$4 --learning_rate=$2 --min_lr=$floor --seed=$3 --train_tokens=$((tokens * $4 / 100)) $flags"
}
over='^steps: \([0-9]*\) of \1$\|gave no finite gradient'         # a run that diverged has ended, too: it is in no table
go() {          # run what is on standard input, a run a line; what it prints goes beside its folder, and says whether it ended
    export OMP_NUM_THREADS=${THREADS:-1}
    xargs -P "$jobs" -I{} sh -c 'run=$1; shift; log=${run#--out=}; log=${log%% *}.txt
        grep -qs "'"$over"'" "$log" || "$@" $run > "$log" 2>&1 || grep -qs "'"$over"'" "$log" || { cat "$log" >&2; exit 255; }' run {} \
        $python train.py --data="$data" $size $evals --save_interval=1000 --keep_ckpts=1 --resume
}
ended() { for d in "$@"; do ! grep -qs '^steps: \([0-9]*\) of \1$' "$d.txt" || echo "$d"; done; }
table() { $python bench.py table $(ended "$@") --png="$png" $match > "$file" || { cat "$file"; exit 1; }; }

# what an earlier call began; then the first seed at every rate, the others at the two best of them
for d in "$out"/*-lr*-s*-b*[0-9]; do
    [ ! -d "$d" ] || echo "${d##*/}" | sed 's/\(.*\)-lr\(.*\)-s\(.*\)-b\(.*\)/\1 \2 \3 \4/'
done | while read -r a r s b; do line "$a" "$r" "$s" "$b"; done | go
for a in $arms; do for r in $rates; do line "$a" "$r" "${seeds%% *}" 100; done; done | go
rates_of() {    # arm, how many, seeds -> its best rates, as they are spelt in the names; the first is the one that the table takes
    $python bench.py table $(ended "$out/$1"-lr*-s$3-b100) --png= | tail -1 | $python -c "
import json, sys
arm = next(iter(json.load(sys.stdin)['arms'].values()))
order = sorted(arm['rates'], key=lambda r: (float(r) != arm['lr'], arm['rates'][r]))
print(*[r for best in order for r in '$rates'.split() if float(r) == float(best)][:$2])"
}
for a in $arms; do
    two=$(rates_of "$a" 2 "${seeds%% *}")
    for r in $two; do for s in ${seeds#* }; do line "$a" "$r" "$s" 100; done; done
done | go

# more seeds of the headline arms, and smaller budgets, at their best rate
headline=$(for a in dense all ltd voc_truncate; do case " $arms " in *" $a "*) echo $a ;; esac; done)
for a in $headline; do
    r=$(rates_of "$a" 1 '*')
    for s in $more; do line "$a" "$r" "$s" 100; done
    [ "$a" = dense ] || for b in $budgets; do for s in $seeds; do line "$a" "$r" "$s" "$b"; done; done
done | go

file=$out/table.md png=$out/table.png match=
table "$out"/*-b100
file=$out/match.md png= match=--match
case " $headline" in *" dense"*) table $(for a in $headline; do echo "$out"/$a-lr*-b*[0-9]; done) ;; *) echo > "$file" ;; esac
cat "$out/table.md" "$out/match.md"
