"""The plan: a whole run as a table, one row an optimizer step, made before step 0 and never changed.

Each row says how far the pool reaches, how long the rows are, how many tokens the middle layers keep, what that costs
in layer-tokens and which learning rate goes with it; the table ends where the budget is used up. So nothing about a
schedule is state: to resume is to go to row N. Learning rate and budget are counted in layer-tokens (the papers'
"consumed tokens"), a measure of compute, so that a step that costs a tenth decays the rate by a tenth.

Paper: "DeepSpeed Data Efficiency", arXiv 2212.03597 section 3.3. Numpy only. See it:  python train.py --plan
"""
import re
from dataclasses import dataclass

import numpy as np

import curriculum
from curriculum import Pace


def lr_at(c, peak, floor, warmup, decay, kind="cosine"):
    """Learning rate after c tokens, the step under way included (2212.03597 section 3.3). c: number or array.

    peak * c / warmup up to c = warmup, then down to floor at c = decay (cosine, linear); floor from decay on. constant:
    level after the warm-up. Raises ValueError where the warm-up is longer than the decay."""
    if kind not in ("cosine", "linear", "constant"):
        raise ValueError(f"--lr_decay={kind} is unknown; it takes cosine, linear or constant")
    if warmup > decay and kind != "constant":
        raise ValueError(f"--warmup_tokens ({warmup:g}) must not be above --decay_tokens ({decay:g})")
    c = np.asarray(c, np.float64)
    x = np.clip((c - warmup) / max(decay - warmup, 1), 0, 1)
    down = {"cosine": (1 + np.cos(np.pi * x)) / 2, "linear": 1 - x, "constant": np.ones_like(x)}[kind]
    lr = np.where(c < warmup, peak * c / max(warmup, 1), floor + (peak - floor) * down)
    return lr if kind == "constant" else np.where(c >= decay, floor, lr)


def effective_length(length, keep, n_layer, n_ltd):
    """Layer-tokens of a row: floor((L * dense layers + K * dropped layers) / layers), as published recipes count."""
    return (length * (n_layer - n_ltd) + keep * n_ltd) // n_layer


DENSE = {"ends": (1, 1), "first": (1, 0), "last": (0, 1), "none": (0, 0)}   # how many layers at either end drop nothing


def dense_ends(text):
    """(layers at the front, at the back) that drop nothing: a word in DENSE, or FRONT,BACK."""
    if re.fullmatch(r"\d+,\d+", text):
        return tuple(map(int, text.split(",")))
    check(ltd_dense=(text, (*DENSE, "FRONT,BACK as 2,2")))
    return DENSE[text]


def amount(text, whole, step, flag):
    """A number of tokens, a percentage of `whole`, or a number of plain steps of `step` tokens; not negative."""
    unit = next((u for u in ("%", "steps") if text.endswith(u)), "")
    try:
        value = float(text.removesuffix(unit)) * {"%": whole / 100, "steps": step, "": 1}[unit]
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{flag}={text} must be a number, a percentage or steps, as 3e9, 2% or 100steps")
    return value


def check(**values):
    """Refuse a word that is not in the list given beside it: check(budget=("x", ("tokens", "steps")))."""
    for flag, (value, allowed) in values.items():
        if value not in allowed:
            raise ValueError(f"--{flag}={value} is unknown; it takes {', '.join(filter(None, allowed))}")


@dataclass
class Plan:
    """Arrays have one entry a step; `spent` arrays are running sums with a 0 in front, (steps + 1,)."""
    steps: int              # optimizer steps of the run
    plain_steps: int        # steps that a run without techniques takes for the same budget; the unit of DURATION in %
    mode: str               # off, truncate or reshape
    limits: dict            # metric -> difficulty limit (a percentile or a value)
    pool: np.ndarray        # samples admitted; 0 = unknown, the data were not at hand
    length: np.ndarray      # T, tokens a row
    keep: np.ndarray        # K, tokens a row in the dropped layers; K = T: nothing is dropped
    batch: np.ndarray       # samples a step, over all ranks
    rows: np.ndarray        # rows a step (reshape makes several of a sample)
    tokens: np.ndarray      # tokens with a loss
    ltd_layers: range       # the layers that keep only K tokens; empty without token dropping
    lr: np.ndarray          # learning rate
    spent: dict             # "sampled" (tokens drawn), "tokens" (with a loss), "layer_tokens" (padding too) -> sums
    sampler: curriculum.Sampler     # the ids of every step; None where the data are not at hand


def make_plan(train_tokens, budget, global_batch, block_size, n_layer, pool, seqlen, seqlen_multiple, ltd, ltd_multiple,
              learning_rate, min_lr, warmup_tokens, decay_tokens, lr_decay, lr_unit, pool_order="easy_first", seed=0,
              ltd_dense="ends", batch_ramp=False, store=None):
    """The Plan for train.py's flags of the same names. store: the training split (data.Store); without it (the data are
    elsewhere) the pool stays unknown. Raises ValueError for settings that make no run."""
    T, B = block_size, global_batch
    counted = "layer_tokens", "tokens", "steps"
    check(budget=(budget, counted), lr_unit=(lr_unit, (*counted, "")))
    if min(train_tokens, B, T, n_layer, seqlen_multiple, ltd_multiple) < 1:
        raise ValueError("--train_tokens, --global_batch, --block_size, --n_layer, --seqlen_multiple and "
                         "--ltd_multiple must be at least 1")
    if "off" in pool and len(pool) > 1:
        raise ValueError("--pool=off cannot stand beside another --pool")
    pools = [] if pool == ["off"] else [Pace.parse(text) for text in pool]
    if len({p.name for p in pools}) < len(pools):
        raise ValueError(f"--pool={pools[-1].text}: a metric has one pace; give each metric once")
    seq = None if seqlen == "off" else Pace.parse(seqlen, "--seqlen", "truncate:25%..100%:40%")
    drop = None if ltd == "off" else Pace.parse(ltd, "--ltd", "25%..100%:70%", named=False)
    mode = seq.name if seq else "off"
    if mode not in ("off", "truncate", "reshape"):
        raise ValueError(f"--seqlen={seqlen}: the mode must be truncate or reshape, "
                         "as in --seqlen=truncate:25%..100%:40%")
    front, back = dense_ends(ltd_dense)
    ltd_layers = range(front, n_layer - back) if drop else range(0)
    if drop and not ltd_layers:
        raise ValueError("--ltd drops tokens in all layers but the first and the last (--ltd_dense), and "
                         f"--n_layer={n_layer} leaves none: take {front + back + 1} or more, or --ltd=off")
    if batch_ramp and (store is not None and store.lengths is not None or not seq and not drop):
        raise ValueError("--batch_ramp copies what --seqlen and --ltd spend a step, over windows: "
                         "give at least one of them, and --samples=window")
    for pace, flag in ((seq, f"--seqlen={seqlen}"), (drop, f"--ltd={ltd}")):
        if pace and not pace.percent and not 1 <= pace.start <= pace.end <= T:
            raise ValueError(f"{flag} must stay within 1..{T} (--block_size)")

    plain_steps, lengths = -(-train_tokens // (B * T)), None if store is None else store.lengths
    if lengths is not None:
        if mode == "reshape":
            raise ValueError(f"--seqlen={seqlen}: reshape cuts windows; with --samples=document take truncate")
        if pools or seq or drop:        # how long a plain run over documents is, only a plain plan can say
            plain_steps = make_plan(train_tokens, budget, B, T, n_layer, ["off"], "off", 1, "off", 1, 0, 0, "0", "0",
                                    "constant", "", seed=seed, store=store).steps
    n, n_ltd, sampler = plain_steps, len(ltd_layers), None
    while True:     # techniques make steps cheaper, so the budget lasts for more: how many shows when it is spent
        t = np.arange(n)
        length = seq.at(t, plain_steps, seqlen_multiple, T) if seq else np.full(n, T)
        if lengths is not None:
            sampler = make_sampler(store, pools, pool_order, n, plain_steps, B, seed)
            sampled, tokens = np.empty((2, n), np.int64)
            for i in range(n):          # rows are as long as the longest one drawn, rounded up to a multiple of 8
                real = lengths[sampler.ids(i)]
                length[i] = min(length[i], -(-int(real.max()) // 8) * 8)
                sampled[i], tokens[i] = real.sum(), np.minimum(real, length[i]).sum()
        keep = np.minimum(drop.at(t, plain_steps, ltd_multiple, T), length) if drop else length
        rows = B * -(-T // length) if mode == "reshape" else np.full(n, B)
        layer_tokens, batch = rows * effective_length(length, keep, n_layer, n_ltd), np.full(n, B)
        if batch_ramp:          # a control: what the techniques would spend a step, on fewer whole dense samples
            batch = np.maximum(1, np.rint(layer_tokens / T).astype(np.int64))
            length = keep = np.full(n, T)
            rows, layer_tokens = batch, batch * T
        if lengths is None:
            sampled = batch * T
            tokens = sampled if mode == "reshape" else batch * length
        spent = {"sampled": sampled, "tokens": tokens, "layer_tokens": layer_tokens}
        spent = {k: np.append(0, v.cumsum()) for k, v in spent.items()}
        # a step counts what a plain step would
        units = spent | {"steps": np.arange(n + 1) * (B * T if lengths is None else -(-train_tokens // plain_steps))}
        if units[budget][-1] >= train_tokens:
            break
        n *= 2
    steps = int(np.searchsorted(units[budget], train_tokens))
    warmup = amount(warmup_tokens, train_tokens, B * T, "--warmup_tokens")
    decay = amount(decay_tokens, train_tokens, B * T, "--decay_tokens")
    if decay <= 0 and lr_decay != "constant":
        raise ValueError(f"--decay_tokens={decay_tokens} leaves nothing to decay over; "
                         "for a level rate give --lr_decay=constant")
    lr = lr_at(units[lr_unit or budget][1:steps + 1], learning_rate, min_lr, warmup, decay, lr_decay)
    t = np.arange(steps)
    if store is not None and sampler is None:
        sampler = make_sampler(store, pools, pool_order, steps, plain_steps, batch[:steps], seed)
    size = sampler.pool_size(t) if sampler else np.zeros(steps, int)
    limits, spent = {p.name: p.limit(t, plain_steps) for p in pools}, {k: v[:steps + 1] for k, v in spent.items()}
    length, keep, batch, rows, tokens = (a[:steps] for a in (length, keep, batch, rows, tokens))
    return Plan(steps, plain_steps, mode, limits, size, length, keep, batch, rows, tokens, ltd_layers, lr, spent,
                sampler)


def make_sampler(store, pools, pool_order, n_steps, plain_steps, global_batch, seed):
    """The Sampler over a store's samples under these pools. A pace by percentile reads ranks, one by value values."""
    admitted = None
    if pools:
        columns = [store.column(p.name, ranked=p.percent) for p in pools]
        columns = curriculum.reorder(columns, pools, pool_order, seed)
        admitted = curriculum.admission(columns, pools, n_steps, plain_steps)
    return curriculum.Sampler(store.n_samples, global_batch, seed, admitted)


def print_plan(p, plot=False):
    """The table on the screen, 21 rows of it and the totals; plot=True also draws plan.png."""
    names = " ".join(f"{name:>9.9}" for name in p.limits)
    print(f"{'step':>8} {names} {'pool':>10} {'length':>7} {'keep':>6} {'rows':>6} "
          f"{'sampled':>15} {'with loss':>15} {'layer-tokens':>15} {'lr':>9}")
    for t in sorted({round(i * (p.steps - 1) / 20) for i in range(21)}):
        limits = " ".join(f"{v[t]:>9g}" for v in p.limits.values())
        sums = " ".join(f"{p.spent[k][t + 1]:>15,}" for k in ("sampled", "tokens", "layer_tokens"))
        print(f"{t:>8} {limits} {p.pool[t] or '-':>10} {p.length[t]:>7} {p.keep[t]:>6} {p.rows[t]:>6} "
              f"{sums} {p.lr[t]:>9.3g}")
    print(f"---\nsteps: {p.steps}\nplain_steps: {p.plain_steps}\ntokens_sampled: {p.spent['sampled'][-1]}\n"
          f"tokens_with_loss: {p.spent['tokens'][-1]}\n"
          f"tokens_cut_off: {p.spent['sampled'][-1] - p.spent['tokens'][-1]}\n"
          f"layer_tokens: {p.spent['layer_tokens'][-1]}")
    if plot:
        from matplotlib.figure import Figure
        figure = Figure(figsize=(12, 3.2), layout="constrained")
        axes = figure.subplots(1, 3)
        lengths = np.stack([p.length, p.keep], 1)
        panels = {"pool (samples)": p.pool, "length, kept tokens": lengths, "learning rate": p.lr}
        for ax, (title, y) in zip(axes, panels.items()):
            ax.plot(y)
            ax.set(title=title, xlabel="step")
        figure.savefig("plan.png", dpi=120)
        print("plan.png: pool, length, kept tokens and learning rate over the steps")
