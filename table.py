"""The table and the plots of finished runs:  python bench.py table out/my_runs/*

Runs are grouped into arms by their techniques, and within an arm by learning rate; an arm is judged at the rate that is
best by mean, by its last checkpoint's loss over the same full-length validation windows, in pairs of equal seeds.
"""
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from output import read_log


@dataclass
class TableConfig:
    png: str = "table.png"      # where to draw loss over layer-tokens; empty = nowhere


def read_run(folder):
    """A finished run: (first line of its log, last validation record, [(layer-tokens, seconds, val_loss)])."""
    if not (Path(folder) / "log.jsonl").is_file():
        raise ValueError(f"{folder} holds no log.jsonl; give the folders of finished runs")
    about, _, val = read_log(folder)
    last = val.get(about["steps"])
    if not last:
        raise ValueError(f"{folder} has not ended (step {max(val)} of {about['steps']}): "
                         f"python train.py --resume --out={folder}")
    return about, last, [(r["layer_tokens"], r["seconds"], r["val_loss"]) for _, r in sorted(val.items())]


def arm_of(config):
    """A run's arm, named by its techniques."""
    order = config.get("pool_order", "easy_first").replace("easy_first", "")
    parts = [f"{p.partition(':')[0]} {order}".strip() for p in config["pool"] if p != "off"]
    parts += [config["seqlen"].partition(":")[0]] * (config["seqlen"] != "off") + ["LTD"] * (config["ltd"] != "off")
    return " + ".join(parts) or "dense"


# what runs of one arm may differ in
OF_A_RUN = {"seed", "learning_rate", "min_lr", "out", "resume", "overwrite", "stop_step", "trace", "wandb",
            "keep_ckpts", "save_interval", "log_interval", "eval_interval", "data", "device", "ltd_kernel",
            "dist_timeout"}
# two-sided 95 % points of Student's t, by degrees of freedom
T95 = [math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]


def mean_sd(values):
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def bench_table(cfg, folders):
    if not folders:
        raise ValueError("table needs the folders of finished runs: python bench.py table out/my_runs/*")
    runs = defaultdict(lambda: defaultdict(dict))           # arm -> learning rate -> seed -> run
    fingerprints, same = set(), {}
    for folder in folders:
        about, last, curve = read_run(folder)
        c = about["config"]
        fingerprints.add(about["fingerprint"])
        arm, rest = arm_of(c), {k: c[k] for k in c.keys() - OF_A_RUN}
        differs = sorted(k for k in rest if rest[k] != same.setdefault(arm, rest)[k])
        twins = runs[arm][c["learning_rate"]]
        if differs or c["seed"] in twins:
            what = f"other --{differs[0]}" if differs else "same learning rate and seed"
            raise ValueError(f"{folder} is an arm '{arm}' with {what} as another folder; give them to two tables")
        twins[c["seed"]] = (last, curve)
    if len(fingerprints) > 1:
        raise ValueError(f"these runs are of different corpora ({', '.join(sorted(fingerprints))}); "
                         "compare one corpus at a time")
    mean_loss = lambda seeds: mean_sd([r[0]["val_loss"] for r in seeds.values()])[0]
    best = {arm: min(rates, key=lambda lr: mean_loss(rates[lr])) for arm, rates in runs.items()}
    dense = runs["dense"][best["dense"]] if "dense" in runs else {}
    print(f"corpus {fingerprints.pop()}; last checkpoint, full-length dense evaluation; "
          "learning rate: the best by mean of those tried\n")
    print("| arm | learning rate | validation loss, mean (sd) | n | minus dense, paired, 95 % | tokens sampled "
          "| with a loss | layer-tokens | seconds |\n|---|---|---|---|---|---|---|---|---|")
    result = {"bench": "table", "arms": {}}
    for arm in sorted(runs, key=lambda a: (a != "dense", a)):
        chosen = runs[arm][best[arm]]
        mean, sd = mean_sd([r[0]["val_loss"] for r in chosen.values()])
        diffs = [chosen[s][0]["val_loss"] - dense[s][0]["val_loss"] for s in chosen if s in dense and arm != "dense"]
        gap = f"{diffs[0]:+.4f} (one pair: no interval)" if diffs else "-"
        if len(diffs) > 1:
            d, s = mean_sd(diffs)
            half = T95[min(len(diffs), len(T95)) - 1] * s / math.sqrt(len(diffs))
            gap = f"{d:+.4f} +- {half:.4f}" + ("" if abs(d) > half else " (does not differ)")
        first = next(iter(chosen.values()))[0]
        seconds = statistics.mean(r[0]["seconds"] for r in chosen.values())
        tried = ", ".join(f"{lr:g}" for lr in sorted(runs[arm]))
        spent = " | ".join(f"{first[k] / 1e6:.2f}M" for k in ("sampled", "tokens", "layer_tokens"))
        print(f"| {arm} | {best[arm]:g} of {tried} | {mean:.4f} ({sd:.4f}) | {len(chosen)} | {gap} | {spent} "
              f"| {seconds:.0f} |")
        result["arms"][arm] = {"lr": best[arm], "mean": round(mean, 4), "sd": round(sd, 4) if sd == sd else None,
                                 "n": len(chosen)}
    print("\nthe sweep: mean validation loss (n)\n")
    for arm, rates in sorted(runs.items()):
        cells = (f"{lr:g}: {mean_loss(seeds):.4f} ({len(seeds)})" for lr, seeds in sorted(rates.items()))
        print(f"    {arm:<24}" + "  ".join(cells))
    if cfg.png:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        _, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
        for arm in sorted(runs, key=lambda a: (a != "dense", a)):
            curves = [r[1] for r in runs[arm][best[arm]].values()]
            points = [[statistics.mean(v) for v in zip(*at)] for at in zip(*curves)][1:]    # mean over the seeds
            for ax, k in zip(axes, (0, 1)):
                ax.plot([p[k] for p in points], [p[2] for p in points], marker=".", label=f"{arm} (n = {len(curves)})")
        axes[0].set(xlabel="layer-tokens", ylabel="validation loss (nats a token)")
        axes[1].set(xlabel="training seconds")
        axes[0].legend()
        plt.savefig(cfg.png, dpi=120)
        print(f"\n{cfg.png}: validation loss over layer-tokens and over seconds")
    print(json.dumps(result))
