"""Measure: training steps with and without token dropping, the kernels, and the tables of finished runs.

    python bench.py step                      step time at K/T = 1, 1/2, 1/4 beside what the FLOP count predicts
    python bench.py step --nanogpt=FOLDER     the dense step beside nanoGPT's, from its source folder
    python bench.py kernel                    draw, gather, scatter and a dropped layer beside their torch forms
    python bench.py analyze                   tokens/s of the offline analysis and of tokenizing, and their memory
    python bench.py sampler                   start, memory, time a batch and resume of a sampler over 100M samples
    python bench.py engines                   memory a rank and time a step under every engine of parallel.py
    python bench.py table out/my_runs/*       mean, deviation, n and cost of every arm, and a plot

Contenders of one measurement take turns, step by step, and medians are compared: on a shared machine only ratios within
one run mean anything. Each command prints a table, then one JSON line.
"""
import importlib.util
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import bench_data
import bench_engines
import ltd
from flags import parse_flags, run_command
from model import GPT, Block, forward_flops
from table import TableConfig, bench_table


@dataclass
class StepConfig:
    n_layer: int = 6            # layers
    n_head: int = 4             # heads
    n_embd: int = 256           # channels
    block_size: int = 512       # tokens a row
    batch_size: int = 8         # rows a step
    vocab_size: int = 2048      # vocabulary
    rounds: int = 15            # steps of each contender
    device: str = ""            # cpu or cuda; empty = cuda if there is one
    dtype: str = ""             # float32 or bfloat16; empty = float32 on a CPU, bfloat16 on a GPU
    nanogpt: str = ""           # folder of nanoGPT's source: its dense step instead of K/T = 1/2, 1/4


@dataclass
class KernelConfig:
    batch_size: int = 0         # rows; 0 = 8 on a GPU, 2 on a CPU
    block_size: int = 0         # tokens a row; 0 = 2048 on a GPU, 512 on a CPU
    keep: int = 0               # kept tokens; 0 = half of them
    n_embd: int = 0             # channels; 0 = 2048 on a GPU, 256 on a CPU
    n_ltd: int = 22             # dropped layers of the draw
    rounds: int = 20            # turns of each contender
    ltd_kernel: str = "auto"    # as in train.py


# -----------------------------------------------------------------------------
# step


def alternate(contenders, rounds, device, calls=1):
    """Median milliseconds a call of each callable, run in turns of `calls` calls after two warm-up rounds."""
    times = {name: [] for name in contenders}
    sync = torch.cuda.synchronize if device != "cpu" else lambda: None
    for i in range(rounds + 2):
        for name, step in contenders.items():
            sync()
            t0 = time.perf_counter()
            for _ in range(calls):
                step(i)
            sync()
            if i > 1:
                times[name].append((time.perf_counter() - t0) * 1e3 / calls)
    return {name: statistics.median(t) for name, t in times.items()}


def name_of(device):
    return torch.cuda.get_device_name(device) if device != "cpu" else f"CPU, {torch.get_num_threads()} threads"


def train_step(model, params, optimizer, x, y, keep=None):
    """What train.py does in a step of one micro-batch."""
    (model(x, y, keep) * (1 / y.numel())).backward()
    grads = [p.grad for p in params]
    norm = torch.nn.utils.get_total_norm(grads).item()
    if norm > 1:
        torch._foreach_mul_(grads, 1 / norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def nanogpt_step(folder, cfg, x, y):
    """One step as nanoGPT's train.py does it on a CPU: its model, its optimizer, clipping as it clips."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder) / "model.py")
    if not (Path(folder) / "model.py").is_file():
        raise ValueError(f"--nanogpt={folder} holds no model.py; give the folder of nanoGPT's source")
    theirs = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = theirs           # its dataclass looks itself up
    spec.loader.exec_module(theirs)
    model = theirs.GPT(theirs.GPTConfig(block_size=cfg.block_size, vocab_size=cfg.vocab_size, n_layer=cfg.n_layer,
                                        n_head=cfg.n_head, n_embd=cfg.n_embd, bias=False)).to(x.device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), x.device.type)

    def step(i):
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()
    return step


def bench_step(cfg):
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, cfg.dtype or ("float32" if device == "cpu" else "bfloat16"))
    if cfg.nanogpt and dtype != torch.float32:
        raise ValueError("--nanogpt compares in float32: add --dtype=float32")
    if min(cfg.n_layer - 2, cfg.rounds, cfg.batch_size, cfg.block_size // 4, cfg.n_head) < 1 or cfg.n_embd % cfg.n_head:
        raise ValueError("step needs 3 layers, 4 tokens, a row and a round, and --n_embd a multiple of --n_head")
    print(f"ltd: {ltd.load_kernel('auto', device)}")
    torch.manual_seed(0)
    B, T = cfg.batch_size, cfg.block_size
    x, y = (torch.randint(cfg.vocab_size, (B, T), device=device) for _ in range(2))

    def ours(K):
        model = GPT(cfg.vocab_size, T, cfg.n_layer, cfg.n_head, cfg.n_embd, dtype=dtype).to(device)
        params, rows = list(model.parameters()), torch.arange(B, device=device)
        optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
        return lambda i: train_step(model, params, optimizer, x, y,
                                    ltd.draw(0, i, rows, model.ltd_layers, T, K) if K < T else None)
    kept = [T] if cfg.nanogpt else [T, T // 2, T // 4]
    contenders = {f"K/T = {K / T:g}" if not cfg.nanogpt else "winnow, dense": ours(K) for K in kept}
    if cfg.nanogpt:
        contenders["nanoGPT"] = nanogpt_step(cfg.nanogpt, cfg, x, y)
    ms = alternate(contenders, cfg.rounds, device)
    base = list(ms.values())[-1 if cfg.nanogpt else 0]
    where = name_of(device)
    print(f"{cfg.n_layer} layers, {cfg.n_embd} channels, T {T}, batch {B}, {dtype} on {where}, "
          f"median of {cfg.rounds} steps in turns\n")
    more, rule = ("", "") if cfg.nanogpt else (" predicted by FLOPs | measured / predicted |", "---|---|")
    print(f"| step | ms | ratio |{more}\n|---|---|---|{rule}")
    result = {"bench": "step", "device": where, "torch": torch.__version__, "ms": ms}
    shape = cfg.n_layer, cfg.n_embd, GPT.ends_flops(cfg.n_embd, T, cfg.vocab_size), T
    for (name, t), K in zip(ms.items(), kept + kept):
        cost = forward_flops(*shape, K, cfg.n_layer - 2) / forward_flops(*shape)
        more = "" if cfg.nanogpt else f" {cost:.3f} | {t / base / cost:.3f} |"
        print(f"| {name} | {t:.1f} | {t / base:.3f} |{more}")
        result.setdefault("ratio", {})[name] = round(t / base, 4)
        result.setdefault("predicted", {})[name] = round(cost, 4)
    print(json.dumps(result))


# -----------------------------------------------------------------------------
# kernel


def bench_kernel(cfg):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    B, T = cfg.batch_size or (8 if on_gpu else 2), cfg.block_size or (2048 if on_gpu else 512)
    C, K, n = cfg.n_embd or (2048 if on_gpu else 256), cfg.keep or T // 2, cfg.n_ltd
    dtype, calls = (torch.bfloat16, 20) if on_gpu else (torch.float32, 3)
    print(f"ltd: {ltd.load_kernel(cfg.ltd_kernel, device)}; torch {torch.__version__}, {name_of(device)}; "
          f"B {B}, T {T}, K {K}, C {C}, {dtype}")
    rows, layers = torch.arange(B, device=device), torch.arange(1, n + 1, device=device)
    keep = ltd.draw(0, 0, rows, layers, T, K)[:, 0].contiguous()
    x, y = torch.randn(B, T, C, device=device, dtype=dtype), torch.randn(B, K, C, device=device, dtype=dtype)
    wide, batch, long = keep.long()[..., None].expand(-1, -1, C), rows[:, None], keep.long()
    block = Block(C, max(1, C // 128)).to(device)

    def layer(drop):
        def step(i):
            leaf = x.detach().requires_grad_()
            drop(leaf * 1).sum().backward()         # * 1: the stream is a sum's result, as in the model
            block.zero_grad()
        return step

    def indexing(x):
        out = x.clone()
        out[batch, long] = block(x[batch, long])
        return out

    def plain(x):
        return x.scatter(1, wide, block(x.gather(1, wide)))

    groups = {      # name: (ideal rows moved, {contender: call})
        f"draw, {n} layers": (0, {
            "ours": lambda i: ltd.draw(0, i, rows, layers, T, K),
            "torch, hash": lambda i: ltd._draw(0, i, rows, layers, T, K),
            "torch, rand + argsort": lambda i: torch.rand(B, n, T, device=device).argsort(-1)[..., :K].sort(-1)}),
        "gather": (2 * K, {
            "ours": lambda i: torch.ops.ltd.gather(x, keep),
            "torch, gather": lambda i: x.gather(1, wide), "torch, indexing": lambda i: x[batch, long]}),
        "scatter": (2 * K, {
            "ours": lambda i: torch.ops.ltd.scatter_(x, y, keep), "torch, scatter_": lambda i: x.scatter_(1, wide, y),
            "torch, indexing": lambda i: x.index_put_((batch, long), y)}),
        "dropped layer, forward and backward": (0, {
            "ours": layer(lambda x: ltd.drop(block, x, keep, inplace=True)),
            "torch, gather + scatter": layer(plain), "torch, indexing": layer(indexing)}),
    }
    if on_gpu:      # on a CPU compiling takes a minute and gains nothing
        compiled_gather = torch.compile(lambda x: x.gather(1, wide))
        compiled_scatter = torch.compile(lambda x, y: x.scatter_(1, wide, y))
        compiled = {"gather": lambda i: compiled_gather(x), "scatter": lambda i: compiled_scatter(x, y),
                    "dropped layer, forward and backward": layer(torch.compile(plain))}
        for name, call in compiled.items():
            groups[name][1]["torch, compiled"] = call
    big, target = torch.empty(2, 256 << 20 if on_gpu else 16 << 20, dtype=torch.uint8, device=device)
    copy = 2 * big.numel() / alternate({"copy": lambda i: target.copy_(big)}, cfg.rounds, device, calls)["copy"] / 1e6
    print(f"device copy: {copy:.0f} GB/s read and written\n\n"
          "| what | form | us | GB/s | of copy |\n|---|---|---|---|---|")
    result = {"bench": "kernel", "device": name_of(device), "torch": torch.__version__, "shape": [B, T, K, C],
              "copy_gb_s": round(copy), "us": {}}
    for what, (ideal, contenders) in groups.items():
        for form, ms in alternate(contenders, cfg.rounds, device, calls).items():
            rate = B * ideal * C * x.element_size() / ms / 1e6
            rates = f" {rate:.0f} | {rate / copy:.0%} |" if ideal else " - | - |"
            print(f"| {what} | {form} | {ms * 1e3:.1f} |{rates}")
            result["us"].setdefault(what, {})[form] = round(ms * 1e3, 1)
    moved = B * C * x.element_size() / 2**20
    print(f"\nforward traffic of a dropped layer: ours 4K rows = {4 * K * moved:.0f} MiB; "
          f"a scatter into a copy 4K + 2T rows = {(4 * K + 2 * T) * moved:.0f} MiB")
    print(json.dumps(result))


def main():
    what, *argv = sys.argv[1:] or [""]
    folders, flags = [a for a in argv if not a.startswith("--")], [a for a in argv if a.startswith("--")]
    if what == "table":
        return bench_table(parse_flags(TableConfig, flags, "Tables of finished runs.")[0], folders)
    if what == "step":
        return bench_step(parse_flags(StepConfig, argv, "Time training steps.")[0])
    if what == "kernel":
        return bench_kernel(parse_flags(KernelConfig, argv, "Time the kernels of token dropping.")[0])
    if what == "analyze":
        return bench_data.bench_analyze(parse_flags(bench_data.AnalyzeConfig, argv, "Time the offline analysis.")[0])
    if what == "sampler":
        return bench_data.bench_sampler(parse_flags(bench_data.SamplerConfig, argv, "Time the sampler.")[0])
    if what == "engines":
        return bench_engines.bench_engines(parse_flags(bench_engines.EnginesConfig, argv, "Compare the engines.")[0])
    raise ValueError("bench.py measures one thing a call: python bench.py step | kernel | analyze | sampler | engines "
                     "| table FOLDERS; --help behind one lists its flags")


if __name__ == "__main__":
    run_command(main)
