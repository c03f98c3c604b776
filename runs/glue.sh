#!/usr/bin/env bash
# The eight GLUE tasks of the paper (arXiv 2212.03597 section 4.2), five seeds each:  runs/glue.sh MODEL GLUE_FOLDER [TOKENIZER]
#     MODEL        a BERT: a folder in Hugging Face's layout, or a .pt of ours (--export=model.pt)
#     GLUE_FOLDER  CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE, as GLUE's download gives them (train.tsv, dev.tsv)
#     TOKENIZER    the model's vocab.txt or tokenizer.json; MODEL/vocab.txt if not said
# Needs: for BERT-base a GPU and about a day for all, or a CPU and an evening for RTE, MRPC and STS-B (TASKS="rte mrpc stsb"). Three epochs of 32
# examples, a linear decay, rows of 128 tokens; RATES are tried with the first seed, the best by validation gets all SEEDS. Validation scores:
# the test labels of GLUE are not public. The paper reports averages of 87.3 to 87.6 for BERT-large.
set -euo pipefail
die() { echo "error: $1" >&2; exit 2; }
[ -e "${1:-}" ] && [ -d "${2:-}" ] || die "give a model and GLUE's folder: runs/glue.sh bert_folder glue_data"
model=$(realpath "$1") glue=$(realpath "$2") tokenizer=${3:-$1/vocab.txt}
[ -f "$tokenizer" ] || die "$tokenizer does not exist; give the model's tokenizer as the third word"
tokenizer=$(realpath "$tokenizer")
cd "$(dirname "$0")/.."
python=${PYTHON:-python} out=${OUT:-out/glue} tasks=${TASKS:-cola sst2 mrpc stsb qqp mnli qnli rte}
rates=${RATES:-2e-5 3e-5 5e-5} seeds=${SEEDS:-1 2 3 4 5} epochs=${EPOCHS:-3}
folder() { case $1 in cola) echo CoLA ;; sst2) echo SST-2 ;; stsb) echo STS-B ;; mnli) echo MNLI ;; *) echo "$1" | tr a-z A-Z ;; esac; }
last() {        # the last validation of a run: its first metric
    $python - "$1" <<'PY'
import json, sys
found = [r for r in map(json.loads, open(f"{sys.argv[1]}/log.jsonl")) if "val_loss" in r][-1]
print(next(v for k, v in found.items() if k in ("matthews", "accuracy", "pearson")))
PY
}
mkdir -p "$out"
settings="$model $(stat -L -c %Y "$model") $tokenizer $glue $epochs"
[ ! -f "$out/settings.txt" ] || [ "$(cat "$out/settings.txt")" = "$settings" ] || die "$out holds runs of other settings ($(cat "$out/settings.txt")); take another OUT"
echo "$settings" > "$out/settings.txt"
for task in $tasks; do
    data=$out/data/$task
    [ -d "$data" ] || $python data_analyze.py --task="$task" --text="$glue/$(folder "$task")" --tokenizer="$tokenizer" --out="$data"
    steps=$($python -c "import json; n = json.load(open('$data/meta.json'))['documents']['train']; print(-(-$epochs * n // 32))")
    run() {     # rate, seed
        local name=$out/$task-lr$1-s$2
        grep -qs "^steps: \([0-9]*\) of \1$" "$name.txt" || ${LAUNCH:-$python} train.py --init_from="$model" --data="$data" --out="$name" --overwrite --seed="$2" \
            --block_size=128 --global_batch=32 --batch_size="${MICRO:-32}" --budget=steps --train_tokens=$((steps * 32 * 128)) --learning_rate="$1" --min_lr=0 \
            --lr_decay=linear --warmup_tokens=10% --weight_decay=0.01 --beta2=0.999 --dropout=0.1 --ltd=off --eval_samples=0 --eval_interval=1000000000 \
            --save_interval=1000000000 > "$name.txt" 2>&1 || { cat "$name.txt" >&2; exit 1; }
    }
    best= top=-2
    for rate in $rates; do
        run "$rate" "${seeds%% *}"
        score=$(last "$out/$task-lr$rate-s${seeds%% *}")
        if awk "BEGIN { exit !($score > $top) }"; then best=$rate top=$score; fi
    done
    for seed in $seeds; do run "$best" "$seed"; done
    $python - "$task" "$best" $(for seed in $seeds; do echo "$out/$task-lr$best-s$seed"; done) <<'PY'
import json, statistics, sys
task, rate, *runs = sys.argv[1:]
last = [[r for r in map(json.loads, open(f"{run}/log.jsonl")) if "val_loss" in r][-1] for run in runs]
names = [k for k in last[0] if k in ("matthews", "accuracy", "f1", "pearson", "spearman")]
cells = [f"{n} {100 * statistics.mean(v):.2f} (sd {100 * statistics.stdev(v) if len(v) > 1 else float('nan'):.2f})" for n in names for v in [[r[n] for r in last]]]
print(f"| {task} | {rate} | {', '.join(cells)} | {len(runs)} |")
PY
done | tee "$out/table.md"
