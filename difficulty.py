"""Difficulty: one number a sample, by which a curriculum orders the data; computed offline, kept beside the store.

A column is T<block_size>/<metric>.npy, one number a sample; <metric>.rank.npy, each sample's place in the sorted order;
and <metric>.json with the fingerprint of the data. Samples are worked on in chunks that never depend on the number of
threads or parts, so neither does a byte of the result. A metric of your own is a function (tokens (N, T), mask (N, T))
-> (N,) in a file of yours.

Paper: arXiv 2212.03597 section 3.1. Run:  python data_analyze.py --data=data/mine --metric=voc,zlib,my.py:syllables
"""
import json
import os
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import parts
from curriculum import load_function, ranks
from data import digest_of, write_atomic
from images import ImageStore, open_store
from tokenizer import load_tokenizer

CHUNK = 1 << 22     # tokens in flight in a thread


def unigram_surprise(splits, vocab_size, workers=1):
    """-ln p of every token id, (V,) float64: p = count / total over all `splits`, zero counts taken as 1 first."""
    def count(chunk):
        # 32 bits are looked at first: bincount would make room for the largest, whatever it is
        wide = chunk.dtype.itemsize > 2
        counts = np.bincount(chunk, minlength=vocab_size) if not wide or 0 <= chunk.min() <= chunk.max() < vocab_size \
            else ()
        if len(counts) != vocab_size:
            raise ValueError(f"{getattr(chunk, 'filename', 'the store')} holds tokens from {chunk.min()} to "
                             f"{chunk.max()}; its vocab_size is {vocab_size}: make the data again")
        return counts
    counts = np.zeros(vocab_size, np.int64)
    with ThreadPoolExecutor(workers) as pool:
        # a quarter of a chunk at a time: bincount makes 8 bytes of every token, and those should stay in the cache
        for c in pool.map(count, (t[i:i + CHUNK // 4] for t in splits for i in range(0, len(t), CHUNK // 4))):
            counts += c
    counts[counts == 0] = 1
    return -np.log(counts / counts.sum())


# Each metric is made ready for a store, which may take a pass over it, and is then a function of a range of samples,
# (first, last) -> (last - first,) numbers, that threads may call at once.


def voc(store, workers):
    """Vocabulary rarity: the sum over a sample's inputs of -ln p(token), p over the whole training split (2212.03597
    section 3.1). Two passes, over 100M tokens/s a core. The paper's metric for text: rare words are seen late."""
    surprise = unigram_surprise(store.tokens, store.meta["vocab_size"], workers)
    per = max(1, (1 << 16) // store.block_size)         # what fits a core's cache

    def sums(first, last):
        x, mask = store.inputs(first, last)                                             # (k, T), (k, T) or None
        out = np.empty(len(x))
        for i in range(0, len(x), per):
            # clip: the count has checked the range, and a look-up that does not check it again takes half the time
            rare = surprise.take(x[i:i + per], mode="clip")
            out[i:i + per] = (rare if mask is None else rare * mask[i:i + per]).sum(1)                      # (k,)
        return out
    return sums


def seqlen(store, workers):
    """Tokens of a document sample that are no padding, cut at block_size: short documents first. Costs nothing; what it
    saves is padding, since a batch is only as long as its longest row."""
    if store.lengths is None:
        raise ValueError("--metric=seqlen: windows are all equally long; it needs --samples=document")
    return lambda first, last: store.lengths[first:last]


def seqlen_voc(store, workers):
    """Length, and rarity among samples of one length, as one number: seqlen + voc / (more than any voc). In a pace by
    value its limits are lengths."""
    length, rarity = seqlen(store, workers), voc(store, workers)
    most = store.block_size * np.log(sum(map(len, store.tokens)) + store.meta["vocab_size"]) + 1    # p >= 1 / total
    return lambda first, last: length(first, last) + rarity(first, last) / most


def text_zlib(store, workers):
    """Compressed bytes / raw bytes of the sample's text (zlib, level 6): repetitive text is easy. About 5M tokens/s a
    core. Reported to order better than rarity (arXiv 2506.11300). Needs the store's tokenizer."""
    tokenizer = load_tokenizer(store.folder)
    if tokenizer is None:
        raise ValueError(f"--metric=zlib needs text, and {store.folder} has no tokenizer.json of data_analyze.py's: "
                         "copy the one of a store made with the same --tokenizer")

    def ratio(x):
        raw = tokenizer.decode(x).encode()
        return len(zlib.compress(raw)) / max(1, len(raw))

    def ratios(first, last):
        x, mask = store.inputs(first, last)
        return np.array([ratio(row if mask is None else row[m]) for row, m in zip(x, x if mask is None else mask)])
    return ratios


def reference_loss(store, checkpoint):
    """Mean loss of the sample under a checkpoint of ours (dense): difficulty as a reference model sees it. Costs a
    forward pass over the corpus, on a GPU if there is one."""
    import torch

    from checkpoint import load, read
    from model import FAMILIES
    try:
        saved = read(checkpoint)
        c, vocab_size = saved["config"], saved["vocab_size"]
    except Exception as e:      # torch.load raises whatever the damage makes of it
        raise ValueError(f"--checkpoint={checkpoint} is no checkpoint of train.py ({type(e).__name__})") from None
    family, image = c.get("arch", "gpt"), isinstance(store, ImageStore)
    if family != ("vit" if image else "gpt"):
        raise ValueError(f"--checkpoint={checkpoint} is a {family}; the loss of "
                         f"{'images is a vit' if image else 'texts is a gpt'}'s")
    ends = saved.get("ends", {"vocab_size": vocab_size})
    if image and ends["n_labels"] != len(store.meta["classes"]):
        raise ValueError(f"--checkpoint={checkpoint} knows {ends['n_labels']} classes, {store.folder} has "
                         f"{len(store.meta['classes'])}")
    if not image and store.block_size > c["block_size"]:
        raise ValueError(f"--block_size={store.block_size} is longer than the checkpoint's {c['block_size']}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {name: c[name] for name in c.keys() & {"n_layer", "n_head", "n_embd", "bias", "pos", "gelu", "norm",
                                      "n_expert", "expert_top_k", "moe_every"}}
    if not image and vocab_size != store.meta["vocab_size"]:
        raise ValueError(f"--checkpoint={checkpoint} has a vocabulary of {vocab_size}, "
                         f"{store.folder} one of {store.meta['vocab_size']}; both must be of one tokenizer")
    model = FAMILIES[family](**ends, **shape, **({} if image else {"block_size": c["block_size"]}))
    load(checkpoint, saved, {"model": dict(model.named_parameters())})
    model.to(device).eval()
    per = 256 if image else max(1, 8192 // store.block_size)

    @torch.no_grad()
    def losses(first, last):
        out = np.empty(last - first)
        for i in range(first, last, per):
            if image:
                x, y = (torch.from_numpy(a).to(device) for a in store.rows(np.arange(i, min(i + per, last))))
                out[i - first:i - first + per] = model(x, y, reduction="none").cpu()                    # (k,)
                continue
            rows = torch.from_numpy(store.rows(np.arange(i, min(i + per, last)))).to(device)            # (k, T+1)
            loss = model(rows[:, :-1].clamp(min=0), rows[:, 1:], reduction="none").view(len(rows), -1)
            out[i - first:i - first + per] = (loss.sum(1) / (rows[:, 1:] >= 0).sum(1)).cpu()            # (k,)
        return out
    return losses


def own(store, metric):
    """The user's FILE.py:FUNCTION, called with up to 1,024 samples at a time."""
    f, what = load_function(metric), "(tokens (N, T) integers, mask (N, T) booleans)"
    if isinstance(store, ImageStore):
        what = "(images (N, channels, H, W) integers, labels (N,) integers)"

    def values(first, last):
        out = []
        for i in range(first, last, 1024):
            x, mask = store.inputs(i, min(i + 1024, last))
            x = x.astype(np.int64)                      # differences of unsigned numbers would wrap
            try:
                v = np.asarray(f(x, np.ones(x.shape, bool) if mask is None else mask), np.float64)
            except (TypeError, ValueError) as e:
                raise ValueError(f"--metric={metric} failed ({e}); it must be a function of {what} "
                                 "that returns (N,) numbers") from e
            if v.shape != (len(x),):
                raise ValueError(f"--metric={metric} returned shape {v.shape} for tokens {x.shape}; "
                                 f"it must be ({len(x)},)")
            out.append(v)
        return np.concatenate(out)
    return values


METRICS = {"voc": voc, "seqlen": seqlen, "seqlen_voc": seqlen_voc, "zlib": text_zlib, "loss": reference_loss}


def compute(store, metric, checkpoint="", workers=1, job=None):
    """This job's share of the difficulties, (n,), by a name in METRICS or the user's own FILE.py:FUNCTION."""
    if isinstance(store, ImageStore) and metric != "loss" and ".py:" not in metric:
        raise ValueError(f"--metric={metric} is of texts; images have loss, and FILE.py:FUNCTION")
    if metric not in METRICS:
        if metric.rpartition(":")[2] in METRICS:
            raise ValueError(f"--metric={metric} would replace the column of the built-in metric; rename your function")
        f, threads = own(store, metric), 1              # who writes a function need not think of threads
    elif metric == "loss":
        f, threads = reference_loss(store, checkpoint), 1
    else:
        f, threads = METRICS[metric](store, workers), workers
    step = max(1, CHUNK // store.block_size)
    starts = (job or parts.Job()).share(-(-store.n_samples // step))
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda i: f(i * step, min((i + 1) * step, store.n_samples)), starts))
    return np.concatenate(found) if found else np.empty(0)


def write_column(store, metric, values, seconds):
    """The three files of a column, each whole or not at all, the .json last."""
    base = store.columns / metric.rpartition(":")[2]
    if not np.isfinite(values).all():
        raise ValueError(f"--metric={metric} is not finite for sample {int(np.argmin(np.isfinite(values)))}")
    store.columns.mkdir(exist_ok=True)
    Path(f"{base}.json").unlink(missing_ok=True)        # values and ranks of two versions never stand together
    write_atomic(f"{base}.npy", lambda f: np.save(f, values))
    write_atomic(f"{base}.rank.npy", lambda f: np.save(f, ranks(values)))
    info = {"metric": base.name, "block_size": store.block_size, "samples": len(values),
            "fingerprint": store.meta["fingerprint"], "code": digest_of(metric.rpartition(":")[0])}
    write_atomic(f"{base}.json", lambda f: f.write(json.dumps(info).encode()))
    quartiles = " ".join(f"{v:.4g}" for v in np.quantile(values, [0, .25, .5, .75, 1]))
    print(f"{base}.npy: {len(values):,} samples in {seconds:.1f} s; quartiles {quartiles}", flush=True)


def analyze(folder, block_size, metrics, checkpoint="", samples="window", workers=0, job=None):
    """Make the columns of `metrics`, or this job's part of them."""
    job, workers = job or parts.Job(), workers or os.cpu_count()
    store = open_store(folder, block_size, samples)
    for metric in metrics:
        start = time.time()
        if job.alone:
            write_column(store, metric, compute(store, metric, checkpoint, workers), time.time() - start)
            continue
        of = {"loss": checkpoint, "zlib": store.folder / "tokenizer.json"}.get(metric, metric.rpartition(":")[0])
        key = parts.key_of(store.meta["fingerprint"], metric, block_size, samples, digest_of(of))
        folder_of_parts = store.columns / f"{metric.rpartition(':')[2]}.parts"
        if job.maps:
            file = parts.part_file(folder_of_parts, job)
            if not parts.is_done(file, key):
                values = compute(store, metric, checkpoint, workers, job)
                write_atomic(file.with_suffix(".npy"), lambda f: np.save(f, values))
                parts.finish(file, key)
        job.wait()
        if job.reduces:
            values = [np.load(file.with_suffix(".npy")) for file, _ in parts.collect(folder_of_parts, key, job)]
            write_column(store, metric, np.concatenate([v for v in values if len(v)]), time.time() - start)
            parts.remove(folder_of_parts)
        job.wait()


def show(folder, block_size, metrics, samples="window"):
    """Print each column's quantiles and its easiest and hardest samples as text, and draw its histogram."""
    store, tokenizer = open_store(folder, block_size, samples), load_tokenizer(folder)
    for name in (m.rpartition(":")[2] for m in metrics):
        values = store.column(name)
        marks = (0, 1, 10, 25, 50, 75, 90, 99, 100)
        print(f"{name}: " + " ".join(f"{q}%: {v:.5g}" for q, v in zip(marks, np.percentile(values, marks))))
        order = np.argsort(values, kind="stable")
        for label, ids in (("easiest", order[:3]), ("hardest", order[::-1][:3])):
            for i in ids:
                if isinstance(store, ImageStore):
                    print(f"    {label}: image {i}, {values[i]:.5g}: {store.meta['classes'][store.labels[i]]}")
                    continue
                x = store.rows([i])[0, :-1]
                x = x[x >= 0]
                text = tokenizer.decode(x) if tokenizer else " ".join(map(str, x))
                print(f"    {label}: sample {i}, {values[i]:.5g}: {text[:160]!r}")
        from matplotlib.figure import Figure
        file = store.columns / f"{name}.png"
        figure = Figure(figsize=(5, 3), layout="constrained")
        ax = figure.subplots()
        ax.hist(values, bins=100)
        ax.set(xlabel=name, ylabel="samples")
        write_atomic(file, lambda f: figure.savefig(f, dpi=120, format="png"))
        print(f"    {file}: its histogram")
