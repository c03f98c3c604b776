"""The table and the plots of finished runs:  python bench.py table out/my_runs/*

Runs are grouped into arms by their techniques, and within an arm by learning rate; an arm is judged at the rate that is
best by mean among those with the most seeds, by its last checkpoint's loss over the same full-length validation
windows, in pairs of equal seeds. The rate is chosen on the windows it is judged by, for every arm alike, and the
intervals are of one comparison each: among twenty arms one may miss its interval by chance.
"""
import dataclasses
import json
import math
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from config import LAYOUT, Config
from output import read_log


@dataclass
class TableConfig:
    against: str = "dense"      # the arm that the others are compared with, in pairs of equal seeds
    match: bool = False         # instead: at which part of the dense budget an arm reaches the dense loss
    png: str = "table.png"      # where to draw loss over layer-tokens; empty = nowhere


def read_run(folder):
    """A finished run: (first line of its log, last validation record, [(layer-tokens, seconds, val_loss)])."""
    if not (Path(folder) / "log.jsonl").is_file():
        raise ValueError(f"{folder} holds no log.jsonl; give the folders of finished runs")
    about, _, val = read_log(folder)
    if not val:
        raise ValueError(f"{folder} has no evaluation yet: python train.py --resume --out={folder}")
    last = val.get(about["steps"])
    if not last:
        raise ValueError(f"{folder} has not ended (step {max(val)} of {about['steps']}): "
                         f"python train.py --resume --out={folder}")
    return about, last, [(r["layer_tokens"], r["seconds"], r["val_loss"]) for _, r in sorted(val.items())]


def arm_of(config):
    """A run's arm, named by its techniques."""
    c = DEFAULTS | config
    order = c["pool_order"].replace("easy_first", "").replace("_", " ")
    pools, parts = [f"{p.partition(':')[0]} {order}".strip() for p in c["pool"] if p != "off"], []
    parts += [c["seqlen"].partition(":")[0]] * (c["seqlen"] != "off")
    if c["ltd"] != "off":
        start, end = re.match(r"([^:]+?)\.\.([^:]+):", c["ltd"]).groups()
        kind = "LTD" if c["ltd_choice"] == "random" else "TokenBypass"
        parts.append(kind + f" constant {start}" * (start == end) + " one draw" * (c["ltd_redraw"] == "once")
                     + {"ends": "", "first": ", last layer too", "last": ", first layer too",
                        "none": ", first and last layer too"}.get(c["ltd_dense"], f", {c['ltd_dense']} layers dense"))
    parts += [f"{c['n_expert']} experts"] * (c["n_expert"] > 0)
    if c["batch_ramp"]:
        parts = [f"dense, batches as {' + '.join(parts)}"]
    rate = f", rate by {c['lr_unit']}" * (c["lr_unit"] not in ("", c["budget"]))
    return (" + ".join(pools + parts) or "dense") + rate


DEFAULTS = dataclasses.asdict(Config())     # runs of an earlier version lack some flags
# what makes an arm; all else is the same for all arms of a table
OF_AN_ARM = {"pool", "pool_order", "seqlen", "seqlen_multiple", "ltd", "ltd_multiple", "ltd_dense", "ltd_redraw",
             "ltd_choice", "batch_ramp", "n_expert", "expert_top_k", "moe_every", "moe_balance", "moe_z", "lr_unit",
             "warmup_tokens", "decay_tokens"}
# what runs of one arm may differ in
OF_A_RUN = {"seed", "learning_rate", "min_lr", "out", "resume", "overwrite", "stop_step", "trace", "wandb",
            "keep_ckpts", "save_interval", "log_interval", "eval_interval", "data", "device", "ltd_kernel",
            "dist_timeout", "wandb_group", "recompute", "ckpt_async", "tensorboard", "profile", "export", *LAYOUT}
# two-sided 95 % points of Student's t, by degrees of freedom
T95 = [math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]


def mean_sd(values):
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def read_arms(folders, free=()):
    """{arm: {key: {seed: (last record, curve, config)}}}, key: the learning rate, or (budget, rate) where train_tokens
    is free. Refuses runs that cannot stand in one table."""
    if not folders:
        raise ValueError("table needs the folders of finished runs: python bench.py table out/my_runs/*")
    arms, same, corpora = defaultdict(lambda: defaultdict(dict)), {}, set()
    for folder in folders:
        about, last, curve = read_run(folder)
        c = DEFAULTS | about["config"]
        corpora.add(about["fingerprint"])
        arm, rest = arm_of(c), {k: c[k] for k in c.keys() - OF_A_RUN - set(free)}
        differs = sorted(k for k in rest if rest[k] != same.setdefault(arm, rest).get(k))
        alien = sorted(k for k in rest.keys() - OF_AN_ARM if rest[k] != same.setdefault("", rest).get(k))
        if alien:
            raise ValueError(f"{folder} has --{alien[0]}={rest[alien[0]]}, another one "
                             f"{same[''][alien[0]]}; only techniques may differ between the arms of a table")
        twins = arms[arm][(c["train_tokens"], c["learning_rate"]) if free else c["learning_rate"]]
        if differs or c["seed"] in twins:
            what = f"other --{differs[0]}" if differs else "same learning rate and seed"
            raise ValueError(f"{folder} is an arm '{arm}' with {what} as another folder; give them to two tables")
        twins[c["seed"]] = (last, curve, c)
    if len(corpora) > 1:
        raise ValueError(f"these runs are of different corpora ({', '.join(sorted(corpora))}); "
                         "compare one corpus at a time")
    return arms, corpora.pop()


def mean_loss(seeds):
    """The mean; infinite where one has no number, so that no such rate is ever the best."""
    mean = mean_sd([r[0]["val_loss"] for r in seeds.values()])[0]
    return mean if math.isfinite(mean) else math.inf


def best_rate(rates):
    """Among the rates with the most seeds, so that one lucky run is not chosen."""
    return min(rates, key=lambda lr: (-len(rates[lr]), mean_loss(rates[lr])))


def bench_match(cfg, folders):
    """How much less? Every arm at several budgets, each run fully decayed inside its own, at the best of the rates that
    were run there; between two budgets the loss is taken to fall evenly with the logarithm of the budget."""
    if cfg.against != "dense":
        raise ValueError("--match compares with dense: leave --against out")
    arms, corpus = read_arms(folders, ("train_tokens", "warmup_tokens", "decay_tokens"))
    if "dense" not in arms:
        raise ValueError("--match needs runs of the dense arm among the folders")
    best = {}                                           # arm -> {budget: (loss, sd, rate, n)}
    for arm, runs in arms.items():
        best[arm] = {}
        for budget in sorted({b for b, _ in runs}):
            rates = {lr: seeds for (b, lr), seeds in runs.items() if b == budget}
            lr = best_rate(rates)
            best[arm][budget] = (*mean_sd([r[0]["val_loss"] for r in rates[lr].values()]), lr, len(rates[lr]))
    whole = max(best["dense"])
    goal = best["dense"][whole][0]
    budgets = sorted({b for tried in best.values() for b in tried})
    print(f"corpus {corpus}; dense at {whole:,} reaches {goal:.4f}\n\n| arm | "
          + " | ".join(f"{b / whole:.0%} of the budget" for b in budgets) + " | reaches the dense loss at |\n|"
          + "---|" * (len(budgets) + 2))
    result = {"bench": "match", "goal": round(goal, 4), "fraction": {}}
    for arm, tried in sorted(best.items(), key=lambda a: (a[0] != "dense", a[0])):
        at, points = (1.0 if arm == "dense" else None), sorted((b, loss) for b, (loss, *_) in tried.items())
        for (b0, l0), (b1, l1) in zip(points, points[1:]):
            if l0 > goal >= l1:
                at = math.exp(math.log(b0) + (l0 - goal) / (l0 - l1) * math.log(b1 / b0)) / whole
        say = f"{at:.0%}" if at else f"below {points[0][0] / whole:.0%}" if points[0][1] <= goal else "not reached"
        cells = ("{:.4f} ({:.4f}), rate {:g}, n = {}".format(*tried[b]) if b in tried else "" for b in budgets)
        print(f"| {arm} | {' | '.join(cells)} | {say} |")
        result["fraction"][arm] = round(at, 4) if at else say
    print(json.dumps(result))


def bench_table(cfg, folders):
    if cfg.match:
        return bench_match(cfg, folders)
    arms, corpus = read_arms(folders)
    if cfg.against != "dense" and cfg.against not in arms:
        raise ValueError(f"--against={cfg.against} is none of these arms: {'; '.join(sorted(arms))}")
    best = {arm: best_rate(rates) for arm, rates in arms.items()}
    base = arms[cfg.against][best[cfg.against]] if cfg.against in arms else {}
    order = sorted(arms, key=lambda a: (a != cfg.against, a != "dense", a))
    print(f"corpus {corpus}; last checkpoint, full-length dense evaluation; "
          "learning rate: the best by mean of those with the most seeds\n")
    records = [r[0] for rates in arms.values() for seeds in rates.values() for r in seeds.values()]
    judged = [k for k in ("accuracy", "f1", "matthews", "pearson", "spearman") if all(k in r for r in records)]
    more = "".join(f" {k} (sd) |" for k in judged)
    print(f"| arm | learning rate | validation loss, mean (sd) |{more} n | minus {cfg.against}, paired, 95 % "
          "| tokens sampled | with a loss | layer-tokens | PFLOP | seconds |\n" + "|---" * (10 + len(judged)) + "|")
    result = {"bench": "table", "against": cfg.against, "arms": {}}
    for arm in order:
        chosen = arms[arm][best[arm]]
        mean, sd = mean_sd([r[0]["val_loss"] for r in chosen.values()])
        diffs = [chosen[s][0]["val_loss"] - base[s][0]["val_loss"] for s in chosen if s in base and arm != cfg.against]
        gap, d, half = f"{diffs[0]:+.4f} (one pair: no interval)" if diffs else "-", None, None
        if len(diffs) > 1:
            d, s = mean_sd(diffs)
            half = T95[min(len(diffs), len(T95)) - 1] * s / math.sqrt(len(diffs))
            gap = f"{d:+.4f} +- {half:.4f}" + f" ({len(diffs)} pairs)" * (len(diffs) < len(chosen))
            gap += " (not distinguishable)" * (abs(d) <= half)
        first = next(iter(chosen.values()))[0]
        seconds = statistics.mean(r[0]["seconds"] for r in chosen.values())
        tried = ", ".join(f"{lr:g}" for lr in sorted(arms[arm]))
        spent = " | ".join(f"{first[k] / 1e6:.2f}M" for k in ("sampled", "tokens", "layer_tokens"))
        more = "".join(" | {:.4f} ({:.4f})".format(*mean_sd([r[0][k] for r in chosen.values()])) for k in judged)
        print(f"| {arm} | {best[arm]:g} of {tried} | {mean:.4f} ({sd:.4f}){more} | {len(chosen)} | {gap} | {spent} "
              f"| {first.get('flops', math.nan) / 1e15:.3g} | {seconds:.0f} |")
        result["arms"][arm] = {"lr": best[arm], "mean": round(mean, 4), "sd": round(sd, 4) if sd == sd else None,
                               "n": len(chosen), "gap": d and round(d, 4), "half": half and round(half, 4),
                               **{k: round(mean_sd([r[0][k] for r in chosen.values()])[0], 4) for k in judged},
                               "rates": {f"{lr:g}": mean_loss(seeds) for lr, seeds in arms[arm].items()}}
    print("\nthe sweep: mean validation loss (n)\n")
    for arm in order:
        cells = (f"{lr:g}: {mean_loss(seeds):.4f} ({len(seeds)})" for lr, seeds in sorted(arms[arm].items()))
        print(f"    {arm:<40}" + "  ".join(cells))
    if cfg.png:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        figure = Figure(figsize=(9, 3.4 + 0.12 * max(0, len(order) - 6)), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for ax in axes if len(order) > 10 else ():
            ax.set_prop_cycle(color=colormaps["tab20"].colors)
        for arm in order:
            curves = [r[1] for r in arms[arm][best[arm]].values()]
            points = [[statistics.mean(v) for v in zip(*at)] for at in zip(*curves)][1:]    # mean over the seeds
            for ax, k in zip(axes, (0, 1)):
                x = [p[k] / (1, 1e6)[k == 0] for p in points]
                ax.plot(x, [p[2] for p in points], marker=".", label=f"{arm} (n = {len(curves)})")
        axes[0].set(xlabel="layer-tokens, millions", ylabel="validation loss (nats a token)")
        axes[1].set(xlabel="training seconds")
        if len(order) > 6:          # many arms: the names go below
            figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        else:
            axes[0].legend()
        figure.savefig(cfg.png, dpi=120)
        print(f"\n{cfg.png}: validation loss over layer-tokens and over seconds")
    print(json.dumps(result))
