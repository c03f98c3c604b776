"""The tuning guide as a tool: which start and duration a curriculum can have.   python train.py --probe=seqlen [flags]

The papers' rule (arXiv 2108.06084 section 5, 2212.03597 section 3.1): the smallest start, then the largest duration, by
binary search, whose run does not jump in its beginning: no validation perplexity above 1.3 times the best so far. The
beginning is the first 2% of the steps, but at least twice the warm-up: before that a low rate hides everything.
Each try is a call of train.py with the flags given, which ends after those steps; what all of them cost is told.
"""
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from output import read_log

# technique: (starts tried, in %; the duration to begin with, in %; flag from both)
TECHNIQUES = {
    "seqlen": ((3.125, 6.25, 12.5, 25, 50, 75), 40, "--seqlen={}:{:g}%..100%:{}%"),
    "ltd": ((6.25, 12.5, 25, 50, 75), 70, "--ltd={1:g}%..100%:{2}%"),
    "pool": ((1, 2, 5, 10, 20, 40), 40, "--pool={}:{:g}%..100%:{}%:sqrt")}
SHARE, JUMP, FINEST = 0.02, 1.3, 5      # of a run's steps; of the best perplexity; % of duration
EVALUATIONS, WINDOWS = 10, 32           # a try's, and how many windows each where --eval_samples says nothing


def try_one(flag, flags, steps):
    """Train the first `steps` steps: (highest perplexity over the best so far, layer-tokens trained, evaluations)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve().parent / "train.py"), f"--eval_samples={WINDOWS}",
                   *flags, flag, f"--out={folder}/run", f"--stop_step={steps}",
                   f"--eval_interval={max(1, steps // EVALUATIONS)}", "--save_interval=1000000000"]
        p = subprocess.run(command, capture_output=True, text=True)
        if p.returncode and "finite gradient" not in p.stderr:
            last_words = (p.stderr.strip().splitlines() or ["killed"])[-1]
            raise ValueError(f"--probe: train.py ended with {flag}: {last_words}")
        _, _, val = read_log(Path(folder) / "run")
    best, jump = math.inf, math.inf if p.returncode else 0.0
    for step in sorted(val):
        loss = val[step]["val_loss"]
        perplexity = math.exp(min(loss, 700)) if math.isfinite(loss) else math.inf
        best = min(best, perplexity)
        jump = max(jump, perplexity / best if math.isfinite(perplexity) else math.inf)
    return jump, val[max(val)]["layer_tokens"], len(val)


def probe(cfg, flags, plan):
    """Search and print. cfg: train.py's Config; flags: its command line but for the technique; plan: of the run as
    the flags have it. Raises ValueError for an unknown technique, or where nothing is calm."""
    if cfg.probe not in TECHNIQUES:
        raise ValueError(f"--probe={cfg.probe} is unknown; it takes {', '.join(TECHNIQUES)}")
    starts, duration, form = TECHNIQUES[cfg.probe]
    given = {"seqlen": cfg.seqlen, "pool": cfg.pool[0]}.get(cfg.probe, "off").partition(":")[0]
    what = given if given != "off" else {"seqlen": "truncate", "pool": "voc"}.get(cfg.probe)    # a given one stays
    warmup = int(plan.lr.argmax()) + 1
    steps, tried, spent, windows = min(plan.steps, max(10, math.ceil(SHARE * plan.steps), 2 * warmup)), {}, 0, 0

    def good(start, duration):
        nonlocal spent, windows
        flag = form.format(what, start, duration)
        tried[flag], cost, evaluations = try_one(flag, flags, steps)
        spent, windows = spent + cost, windows + evaluations
        verdict = "kept" if tried[flag] <= JUMP else "jumps"
        print(f"{flag:<44} highest perplexity / best so far: {tried[flag]:.3f}  {verdict}", flush=True)
        return verdict == "kept"

    print(f"first {steps} of {plan.steps} steps; a try jumps where perplexity exceeds {JUMP} times the best so far")
    start = next((s for s in starts if good(s, duration)), None)
    if start is None:
        raise ValueError(f"--probe={cfg.probe}: even a start of {starts[-1]:g}% jumps; lower --learning_rate")
    low, high = duration, 100           # low is known to be good
    if good(start, high):
        low = high
    while high - low > FINEST:
        middle = max((low + high) // 2 // FINEST * FINEST, low + FINEST)
        low, high = (middle, high) if good(start, middle) else (low, middle)
    flag = form.format(what, start, low)
    # an evaluated token costs a third of a trained one: it has no backward pass
    each = WINDOWS if not any(f.startswith("--eval_samples=") for f in flags) else cfg.eval_samples
    share = (spent + windows * each * cfg.block_size / 3) / plan.spent["layer_tokens"][-1]
    print(f"---\nuse: {flag}\ntries: {len(tried)}\nlayer_tokens: {spent}\nevaluations: {windows}\n"
          f"share_of_a_run: {share:.3f}")
    print(json.dumps({"probe": cfg.probe, "flag": flag, "tried": {k: round(min(v, 1e9), 4) for k, v in tried.items()},
                      "share_of_a_run": round(share, 4)}))
