"""`python bench.py engines`: memory of a rank and time of a step under every engine, by train.py itself under torchrun.

Theory for N ranks and P weights in float32, AdamW: 16 P bytes where everything is whole (weights, gradients, two
moments: 4 P each). FSDP2 keeps a whole copy beside the shards while it works: of weights and gradients under zero1, tp
and pp, of weights under zero2, of one block under zero3. Under tp and pp a rank has its share of the blocks, and the
embedding whole. Not in it: activations, buffers of messages, the embedding's whole copy under zero3.
"""
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model import GPT, SIZES


@dataclass
class EnginesConfig:
    model: str = "gpt2-medium"  # named size
    ranks: int = 2              # processes
    vocab_size: int = 50257     # vocabulary
    block_size: int = 64        # tokens a row; short, so that weights and not activations fill the memory
    global_batch: int = 2       # rows a step
    batch_size: int = 1         # rows a micro-batch
    steps: int = 4              # of each engine; the first two are not timed
    only: str = ""              # only layouts whose flags hold this
    device: str = "cpu"         # cpu or cuda (then memory is the device's, without its library's share)


# glibc keeps most of what is freed: told not to, a process is as large as what it holds
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "200000", "MALLOC_TRIM_THRESHOLD_": "200000"}
LAYOUTS = {     # flags: bytes a weight on a rank of N; share: of the weights that a rank has under tp or pp
    "--parallel=ddp": lambda N, share: 16, "--parallel=zero1": lambda N, share: 8 + 16 / N,
    "--parallel=zero2": lambda N, share: 4 + 16 / N, "--parallel=zero3": lambda N, share: 16 / N,
    "--parallel=zero3 --offload=cpu": lambda N, share: 16 / N,
    "--parallel=zero3 --recompute=block": lambda N, share: 16 / N,
    "--parallel=zero3 --offload=disk:DISK": lambda N, share: 16 / N,        # 8 / N of it mapped files
    "--tp=N": lambda N, share: 24 * share, "--pp=N": lambda N, share: 24 * share}


def run(cfg, folder, name, *flags):
    """(peak MB of rank 0, ms of its timed steps) of one layout: trains cfg.steps steps and is ended before it saves."""
    out = folder / name
    words = [f"--model={cfg.model}", f"--block_size={cfg.block_size}", f"--global_batch={cfg.global_batch}",
             f"--batch_size={cfg.batch_size}", f"--data={folder}/data", f"--out={out}", f"--device={cfg.device}",
             *flags]
    off = "--pool=off --seqlen=off --ltd=off --train_tokens=1e6 --eval_interval=1000000 --log_interval=1".split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={cfg.ranks}",
               str(Path(__file__).with_name("train.py")), *off, *words, "--eval_samples=1", "--dtype=float32"]
    with open(folder / f"{name}.txt", "w") as printed:
        p = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT,
                             env={"OMP_NUM_THREADS": "1", **RETURN_FREED, **os.environ})
    try:
        records = []
        while len(records) < cfg.steps:
            if p.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended: {(folder / f'{name}.txt').read_text()[-2000:]}")
            time.sleep(0.5)
            lines = (out / "log.jsonl").read_text().splitlines() if (out / "log.jsonl").exists() else []
            records = [r for r in map(json.loads, lines) if "loss" in r]
    finally:        # the ranks by name: torchrun starts each in a session of its own, and SIGTERM would let them save
        ranks = subprocess.run(["pgrep", "-P", str(p.pid)], capture_output=True, text=True).stdout.split()
        for pid in [*map(int, ranks), p.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        p.wait()
        time.sleep(1)
    return records[-1]["memory_mb"], statistics.median(r["ms"] for r in records[2:])


def bench_engines(cfg):
    if cfg.steps < 3:
        raise ValueError(f"--steps={cfg.steps} must be at least 3: the first two are not timed")
    if cfg.model not in SIZES:
        raise ValueError(f"--model={cfg.model} is unknown; it takes {', '.join(SIZES)}")
    n_layer, n_embd, n_head, _, _ = SIZES[cfg.model]
    with torch.device("meta"):
        P = GPT(cfg.vocab_size, cfg.block_size, n_layer, n_head, n_embd).n_params()
    N, result = cfg.ranks, {}
    share = (cfg.vocab_size * n_embd + (P - cfg.vocab_size * n_embd) / N) / P
    with tempfile.TemporaryDirectory(prefix="winnow-") as folder:
        folder = Path(folder)
        (folder / "data").mkdir()
        tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, 1 << 18).astype(np.uint32)
        for split in ("train", "val"):
            tokens.tofile(folder / "data" / f"{split}.bin")
        meta = dict(dtype="uint32", vocab_size=cfg.vocab_size, eot_id=0, fingerprint="random",
                    tokens=dict(train=len(tokens), val=len(tokens)))
        (folder / "data" / "meta.json").write_text(json.dumps(meta))
        base, _ = run(cfg, folder, "base", "--n_layer=2", "--n_embd=16", "--n_head=2", "--model=")
        print(f"{cfg.model}: {P / 1e6:.0f}M weights, {N} ranks, {cfg.device}; a process without a model of note "
              f"({base} MB) is taken off\n\n"
              "| layout | MB a rank | bytes a weight | theory | of the first | ms a step | of the first |\n"
              "|---|---|---|---|---|---|---|", flush=True)
        for i, (flags, theory) in enumerate(LAYOUTS.items()):
            if cfg.only in flags:
                words = flags.replace("DISK", f"{folder}/moments").replace("=N", f"={N}").split()
                mb, ms = run(cfg, folder, str(i), *words)
                mb -= base
                result[flags] = dict(mb=mb, ms=round(ms, 1), bytes=round(mb * 2**20 / P, 2), theory=theory(N, share))
                first = next(iter(result.values()))
                print(f"| `{flags}` | {mb} | {mb * 2**20 / P:.1f} | {theory(N, share):.1f} | {mb / first['mb']:.2f} | "
                      f"{ms:.0f} | {ms / first['ms']:.2f} |", flush=True)
    print(json.dumps({"bench": "engines", "model": cfg.model, "params": P, "ranks": N, "base_mb": base,
                      "layouts": result}))
