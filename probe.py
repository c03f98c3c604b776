"""The tuning guide as a tool: which start and duration a curriculum can have.   python train.py --probe=seqlen [flags]

The papers' rule (arXiv 2108.06084 section 5, 2212.03597 section 3.1): the smallest start, then the largest duration, by
binary search, whose run does not jump within its first 2%: no validation perplexity above 1.3 times the best so far.
Each try is a call of train.py with the flags given, which ends after those steps; what it cost is told.
"""
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from output import read_log

# technique: (starts tried, in %; the duration to begin with, in %; flag from both; the others)
TECHNIQUES = {
    "seqlen": ((3.125, 6.25, 12.5, 25, 50, 75), 40, "--seqlen=truncate:{}%..100%:{}%"),
    "ltd": ((6.25, 12.5, 25, 50, 75), 70, "--ltd={}%..100%:{}%"),
    "pool": ((1, 2, 5, 10, 20, 40), 40, "--pool=voc:{}%..100%:{}%:sqrt")}
SHARE, JUMP, FINEST = 0.02, 1.3, 5      # of a run's steps; of the best perplexity; % of duration


def try_one(flag, flags, steps):
    """Train the first `steps` steps: (highest perplexity over the best so far, layer-tokens spent)."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(__file__).resolve().parent
        command = [sys.executable, str(here / "train.py"), *flags, flag, f"--out={folder}/run", f"--stop_step={steps}",
                   f"--eval_interval={max(1, steps // 10)}", "--save_interval=1000000000"]
        p = subprocess.run(command, capture_output=True, text=True)
        if p.returncode and not Path(folder, "run", "log.jsonl").is_file():
            raise ValueError(f"--probe: train.py refused {flag}: {p.stderr.strip().splitlines()[-1]}")
        _, _, val = read_log(Path(folder) / "run")
    best, jump = math.inf, math.inf if p.returncode else 0.0
    for step in sorted(val):
        perplexity = math.exp(min(val[step]["val_loss"], 700)) if math.isfinite(val[step]["val_loss"]) else math.inf
        best = min(best, perplexity)
        jump = max(jump, perplexity / best)
    return jump, val[max(val)]["layer_tokens"] if val else 0


def probe(technique, flags, plan_steps, budget):
    """Search and print. flags: the rest of the command line, as strings; plan_steps: steps of a run with these flags;
    budget: its layer-tokens. Raises ValueError for an unknown technique."""
    if technique not in TECHNIQUES:
        raise ValueError(f"--probe={technique} is unknown; it takes {', '.join(TECHNIQUES)}")
    starts, duration, form = TECHNIQUES[technique]
    steps, tried, spent = max(10, math.ceil(SHARE * plan_steps)), {}, 0

    def good(start, duration):
        nonlocal spent
        flag = form.format(f"{start:g}", duration)
        tried[flag], cost = try_one(flag, flags, steps)
        spent += cost
        verdict = "kept" if tried[flag] <= JUMP else "jumps"
        print(f"{flag:<44} highest perplexity / best so far: {tried[flag]:.3f}  {verdict}", flush=True)
        return verdict == "kept"

    print(f"first {steps} of {plan_steps} steps; a try jumps where perplexity exceeds {JUMP} times the best so far")
    start = next((s for s in starts if good(s, duration)), None)
    if start is None:
        raise ValueError(f"--probe={technique}: even a start of {starts[-1]:g}% jumps; lower --learning_rate")
    low, high = duration, 100           # low is known to be good
    if good(start, high):
        low = high
    while high - low > FINEST:
        middle = (low + high) // 2 // FINEST * FINEST
        middle = middle if middle > low else low + FINEST
        low, high = (middle, high) if good(start, middle) else (low, middle)
    flag = form.format(f"{start:g}", low)
    print(f"---\nuse: {flag}\ntries: {len(tried)}\nlayer_tokens: {spent}\nshare_of_a_run: {spent / budget:.3f}")
    print(json.dumps({"probe": technique, "flag": flag, "tried": {k: round(min(v, 1e9), 4) for k, v in tried.items()},
                      "share_of_a_run": round(spent / budget, 4)}))
