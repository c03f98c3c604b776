"""Difficulty: one number a sample, by which a curriculum orders the data; computed offline, kept beside the store.

A column is T<block_size>/<metric>.npy, one number a sample, with the fingerprint of its data beside it in a .json. A
metric of your own is a function (tokens (N, T), mask (N, T)) -> (N,) in a file of yours.

Paper: arXiv 2212.03597 section 3.1. Run:  python data_analyze.py --data=data/mine --metric=voc,zlib,my.py:syllables
"""
import json
import time
import zlib
from pathlib import Path

import numpy as np

from curriculum import load_function
from data import Store, load_tokenizer, write_atomic

CHUNK = 1 << 22     # tokens in flight


def unigram_surprise(parts, vocab_size):
    """-ln p of every token id, (V,) float64: p = count / total over all `parts`, zero counts taken as 1 first."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens in parts:
        for i in range(0, len(tokens), CHUNK):
            chunk = np.bincount(tokens[i:i + CHUNK], minlength=vocab_size)
            if len(chunk) > vocab_size:
                raise ValueError(f"a token {len(chunk) - 1} lies outside the vocabulary of {vocab_size}; "
                                 "make the data again")
            counts += chunk
    counts[counts == 0] = 1
    return -np.log(counts / counts.sum())


def voc(store):
    """Vocabulary rarity: the sum over a sample's inputs of -ln p(token), p over the whole training split (2212.03597
    section 3.1). Two passes, about 100M tokens/s a core. The paper's metric for text: rare words are seen late."""
    surprise = unigram_surprise(store.tokens, store.meta["vocab_size"])
    # clip: the count has checked the range, and a look-up that does not check it again takes half the time
    per = max(1, (1 << 16) // store.block_size)         # what fits a core's cache
    return np.concatenate([surprise.take(x, mode="clip").sum(1) for x in store.inputs(per)])    # (k, T) -> (k,)


def text_zlib(store):
    """Compressed bytes / raw bytes of the sample's text (zlib, level 6): repetitive text is easy. About 5M tokens/s a
    core. Reported to order better than rarity (arXiv 2506.11300). Needs the store's tokenizer."""
    tokenizer = load_tokenizer(store.folder)
    if tokenizer is None:
        raise ValueError(f"--metric=zlib needs text, and {store.folder} has no tokenizer.json: put the one that made "
                         "its tokens there")

    def ratio(x):
        raw = tokenizer.decode(x).encode()
        return len(zlib.compress(raw)) / max(1, len(raw))
    return np.array([ratio(x) for part in store.inputs(1024) for x in part])


def reference_loss(store, checkpoint):
    """Mean loss of the sample under a checkpoint of ours (dense): difficulty as a reference model sees it. Costs a
    forward pass over the corpus, on a GPU if there is one."""
    import torch

    from model import GPT
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        c = saved["config"]
    except Exception as e:      # torch.load raises whatever the damage makes of it
        raise ValueError(f"--checkpoint={checkpoint} is no checkpoint of train.py ({type(e).__name__})") from None
    if store.block_size > c["block_size"]:
        raise ValueError(f"--block_size={store.block_size} is longer than the checkpoint's {c['block_size']}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {name: c[name] for name in ("block_size", "n_layer", "n_head", "n_embd", "bias", "pos")}
    model = GPT(store.meta["vocab_size"], **shape)
    model.load_state_dict(saved["model"])
    model.to(device).eval()
    per, out = max(1, 8192 // store.block_size), np.empty(store.n_samples)
    with torch.no_grad():
        for i in range(0, store.n_samples, per):
            rows = torch.from_numpy(store.rows(np.arange(i, min(i + per, store.n_samples)))).to(device)     # (k, T+1)
            out[i:i + per] = model(rows[:, :-1], rows[:, 1:], reduction="none").view(len(rows), -1).mean(1).cpu()
    return out


METRICS = {"voc": voc, "zlib": text_zlib, "loss": reference_loss}


def compute(store, metric, checkpoint=""):
    """(N,) difficulties by a name in METRICS or the user's own FILE.py:FUNCTION(tokens (N, T), mask (N, T)) -> (N,)."""
    if metric == "loss":
        return reference_loss(store, checkpoint)
    if metric in METRICS:
        return METRICS[metric](store)
    if metric.rpartition(":")[2] in METRICS:
        raise ValueError(f"--metric={metric} would replace the column of the built-in metric; rename your function")
    f, values = load_function(metric), []
    for x in store.inputs(1024):
        try:
            v = np.asarray(f(x, np.ones(x.shape, bool)), np.float64)
        except (TypeError, ValueError) as e:
            raise ValueError(f"--metric={metric} failed ({e}); it must be a function of (tokens (N, T) integers, "
                             "mask (N, T) booleans) that returns (N,) numbers") from e
        if v.shape != (len(x),):
            raise ValueError(f"--metric={metric} returned shape {v.shape} for tokens {x.shape}; it must be ({len(x)},)")
        values.append(v)
    return np.concatenate(values)


def analyze(folder, block_size, metrics, checkpoint=""):
    """Write T<block_size>/<metric>.npy with its .json beside it, each whole or not at all."""
    store = Store(folder, "train", block_size)
    (Path(folder) / f"T{block_size}").mkdir(exist_ok=True)
    for metric in metrics:
        name = metric.rpartition(":")[2]
        start, base = time.time(), Path(folder) / f"T{block_size}" / name
        values = compute(store, metric, checkpoint)
        if not np.isfinite(values).all():
            raise ValueError(f"--metric={metric} is not finite for sample {int(np.argmin(np.isfinite(values)))}")
        write_atomic(base.with_suffix(".npy"), lambda f: np.save(f, values))
        info = {"metric": name, "block_size": block_size, "samples": len(values),
                "fingerprint": store.meta["fingerprint"]}
        write_atomic(base.with_suffix(".json"), lambda f: f.write(json.dumps(info).encode()))
        quartiles = " ".join(f"{v:.4g}" for v in np.quantile(values, [0, .25, .5, .75, 1]))
        print(f"{base}.npy: {len(values):,} samples in {time.time() - start:.1f} s; quartiles {quartiles}")


def show(folder, block_size, metrics):
    """Print each column's quantiles and its easiest and hardest samples as text, and draw its histogram."""
    store, tokenizer = Store(folder, "train", block_size), load_tokenizer(folder)
    for name in (m.rpartition(":")[2] for m in metrics):
        values = store.column(name)
        marks = (0, 1, 10, 25, 50, 75, 90, 99, 100)
        print(f"{name}: " + " ".join(f"{q}%: {v:.5g}" for q, v in zip(marks, np.percentile(values, marks))))
        order = np.argsort(values, kind="stable")
        for label, ids in (("easiest", order[:3]), ("hardest", order[::-1][:3])):
            for i in ids:
                x = store.rows([i])[0, :-1]
                text = tokenizer.decode(x) if tokenizer else " ".join(map(str, x))
                print(f"    {label}: sample {i}, {values[i]:.5g}: {text[:160]!r}")
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        file = Path(folder) / f"T{block_size}" / f"{name}.png"
        plt.figure(figsize=(5, 3), layout="constrained")
        plt.hist(values, bins=100)
        plt.gca().set(xlabel=name, ylabel="samples")
        write_atomic(file, lambda f: plt.savefig(f, dpi=120, format="png"))
        plt.close()
        print(f"    {file}: its histogram")
