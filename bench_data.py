"""Measure the offline half and the sampler:  python bench.py analyze, python bench.py sampler

Each measurement is made by a process of its own that has not loaded torch, so that its peak memory is that of the work
(the pages of memory maps included). Data are made up in a temporary folder: token ids by Zipf's law, random numbers.
"""
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass
class AnalyzeConfig:
    tokens: int = 200_000_000   # of the store
    block_size: int = 256       # tokens a sample
    vocab_size: int = 50257     # token ids
    text_mb: int = 24           # text to tokenize, from Python's standard library
    rounds: int = 3             # measurements of each, in turns; the median counts


@dataclass
class SamplerConfig:
    samples: int = 100_000_000  # samples, each with two difficulties
    global_batch: int = 512     # samples a step
    resume_step: int = 200_000  # where a resumed run goes on
    pace_steps: int = 110_000   # DURATION of both pools


def alone(function, *args):
    """Call a function of this file in a fresh process; returns what it returns, and the peak memory in MB."""
    code = f"import json, bench_data; print(json.dumps(bench_data.{function}(*{args!r})))"
    here = Path(__file__).resolve().parent
    p = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True)
    if p.returncode:
        raise RuntimeError(p.stderr)
    return json.loads(p.stdout.splitlines()[-1])


def peak_mb():
    """Peak resident memory of this process. Linux's ru_maxrss would begin with the parent's, VmHWM does not."""
    if os.path.exists("/proc/self/status"):
        line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2          # macOS counts bytes


def median(values):
    return sorted(values)[len(values) // 2]


# -----------------------------------------------------------------------------
# analyze


def make_tokens(folder, n, vocab_size):
    """A store of n token ids whose frequencies fall as 1 / rank."""
    rng, p = np.random.default_rng(0), 1 / np.arange(1, vocab_size + 1)
    table = rng.choice(vocab_size, 1 << 22, p=p / p.sum()).astype(np.uint16)
    with open(Path(folder) / "train.bin", "wb") as f:
        for i in range(0, n, len(table)):
            rng.permutation(table)[:n - i].tofile(f)
    meta = {"dtype": "uint16", "vocab_size": vocab_size, "eot_id": 0, "tokens": {"train": n}, "fingerprint": "made up"}
    (Path(folder) / "meta.json").write_text(json.dumps(meta))


def time_analysis(folder, block_size, workers):
    """voc: (seconds of both passes, seconds with the sort and the files, MB)."""
    import difficulty
    from data import Store
    store, start = Store(folder, "train", block_size), time.time()
    values = difficulty.compute(store, "voc", workers=workers)
    passes = time.time() - start
    difficulty.write_column(store, "voc", values, passes)
    return passes, time.time() - start, peak_mb()


def time_loop(folder, block_size, samples):
    """The same two passes one sample at a time, as one would write them down first: (seconds, MB)."""
    tokens = np.memmap(Path(folder) / "train.bin", np.uint16, "r")
    start, counts, values = time.time(), {}, []
    for i in range(samples):
        ids, n = np.unique(tokens[i * block_size:(i + 1) * block_size], return_counts=True)
        for token, k in zip(ids.tolist(), n.tolist()):
            counts[token] = counts.get(token, 0) + k
    total = sum(counts.values())
    surprise = {token: -np.log(k / total) for token, k in counts.items()}
    for i in range(samples):
        values.append(sum(surprise[t] for t in tokens[i * block_size:(i + 1) * block_size].tolist()))
    np.argsort(values, kind="stable")
    return time.time() - start, peak_mb()


def time_tokenizing(folder, mb, workers, rounds):
    """Bytes/s of encode_all, which yields documents in order, and of tiktoken's own batches with as many threads, in
    turns on the same documents and vocabulary: (ours, theirs)."""
    from collections import Counter

    from data_analyze import Config, encode_all, get_tokenizer
    from text import documents, embedded_files
    cfg, files = Config(tokenizer="bpe", errors="replace", workers=workers), []
    for file in embedded_files():
        if sum(f.stat().st_size for f in files) < mb * 1e6:
            files.append(file)
    tokenizer = get_tokenizer(cfg, files)
    texts, size = list(documents(files, cfg, Counter())), sum(f.stat().st_size for f in files)
    ours, theirs = [], []
    for _ in range(rounds):
        start = time.time()
        n = sum(len(doc) - 1 for doc in encode_all(files, cfg, tokenizer, Counter()))
        ours.append(size / (time.time() - start))
        start = time.time()
        m = sum(map(len, tokenizer.encoding.encode_ordinary_batch(texts, num_threads=workers)))
        theirs.append(size / (time.time() - start))
        assert n == m, (n, m)
    return median(ours), median(theirs)


def bench_analyze(cfg):
    cores = os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        make_tokens(folder, cfg.tokens, cfg.vocab_size)
        rows = {}
        for _ in range(cfg.rounds):
            for workers in sorted({1, 2, cores}):
                rows.setdefault(workers, []).append(alone("time_analysis", folder, cfg.block_size, workers))
        few = max(1, min(cfg.tokens, 2_000_000) // cfg.block_size)
        slow = alone("time_loop", folder, cfg.block_size, few)
    rates = [{w: cfg.tokens / median([r[i] for r in got]) / 1e6 for w, got in rows.items()} for i in (0, 1)]
    passes, rate = rates
    ours, theirs = alone("time_tokenizing", "", cfg.text_mb, cores, cfg.rounds)
    print(f"voc of {cfg.tokens / 1e6:.0f}M tokens, {cfg.block_size} a sample, CPU, {cores} cores; M tokens/s\n\n"
          "| | both passes | with sort and files | times one thread | peak MB |\n|---|---|---|---|---|")
    for w, got in rows.items():
        name = f"{w} thread{'s' * (w > 1)}"
        print(f"| {name} | {passes[w]:.0f} | {rate[w]:.0f} | {passes[w] / passes[1]:.2f}, {rate[w] / rate[1]:.2f} "
              f"| {max(r[2] for r in got):.0f} |")
    loop = few * cfg.block_size / slow[0] / 1e6
    print(f"| a loop over samples ({few * cfg.block_size / 1e6:.0f}M tokens) | | {loop:.2f} | {loop / rate[1]:.3f} "
          f"| {slow[1]:.0f} |\n\ntokenizing, {cores} threads: {ours / 1e6:.1f} MB/s, tiktoken's own batches "
          f"{theirs / 1e6:.1f} MB/s: {ours / theirs:.2f}")
    print(json.dumps({"bench": "analyze", "tokens": cfg.tokens, "mtok_s": {w: round(r, 1) for w, r in rate.items()},
                      "passes_mtok_s": {w: round(r, 1) for w, r in passes.items()},
                      "peak_mb": {w: round(max(r[2] for r in got)) for w, got in rows.items()},
                      "loop_mtok_s": round(loop, 3), "tokenize_mb_s": round(ours / 1e6, 2),
                      "tiktoken_mb_s": round(theirs / 1e6, 2)}))


# -----------------------------------------------------------------------------
# sampler


def make_columns(folder, n):
    """Ranks of one metric, values of another, as the analysis leaves them."""
    rng = np.random.default_rng(0)
    np.save(Path(folder) / "a.rank.npy", rng.permutation(np.arange(n, dtype=np.int32)))
    np.save(Path(folder) / "b.npy", rng.integers(1, 2049, n, np.int32))
    return n, peak_mb()


def time_sampler(folder, n, batch, resume_step, pace_steps):
    """Start-up, batches in order, and a resume: seconds of each, batches, MB."""
    from curriculum import Pace, Sampler, admission
    steps, start = 2 * resume_step, time.time()
    paces = [Pace.parse(f"a:1%..100%:{pace_steps}:sqrt"), Pace.parse(f"b:80..2048:{pace_steps}")]
    columns = [np.load(Path(folder) / name, mmap_mode="r") for name in ("a.rank.npy", "b.npy")]
    sampler = Sampler(n, batch, 1, admission(columns, paces, steps, steps))
    started, batches = time.time() - start, min(20_000, resume_step)
    start = time.time()
    for step in range(batches):
        sampler.ids(step)
    drawn = time.time() - start
    sampler._restart()
    start = time.time()
    sampler.ids(resume_step)
    return started, drawn, time.time() - start, batches, peak_mb()


def bench_sampler(cfg):
    with tempfile.TemporaryDirectory() as folder:
        alone("make_columns", folder, cfg.samples)
        started, drawn, resumed, batches, mb = alone("time_sampler", folder, cfg.samples, cfg.global_batch,
                                                     cfg.resume_step, cfg.pace_steps)
    print(f"{cfg.samples / 1e6:.0f}M samples, two metrics (by percentile, by value), batches of {cfg.global_batch}, CPU"
          f"\n\n| start | a batch | resume at step {cfg.resume_step:,} | peak memory |\n|---|---|---|---|\n"
          f"| {started:.1f} s | {drawn / batches * 1e6:.0f} us | {resumed:.1f} s | {mb:.0f} MB |")
    print(json.dumps({"bench": "sampler", "samples": cfg.samples, "start_s": round(started, 2),
                      "batch_us": round(drawn / batches * 1e6, 1), "resume_s": round(resumed, 2),
                      "peak_mb": round(mb)}))
