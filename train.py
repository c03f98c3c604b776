"""Train a Transformer on less data and less compute: curriculum, token dropping, and one plan for both.

    python train.py                                       the embedded corpus, all techniques on
    python train.py --pool=off --seqlen=off --ltd=off     a plain GPT trainer
    python train.py --plan                                the whole run as a table, without training
    torchrun --nproc_per_node=8 train.py --data=data/mine
    python train.py --sample --resume                     text from the newest checkpoint

A run is a table made before step 0 and never changed: one row a step with pool, length, kept tokens, rows, tokens and
learning rate, ending where the budget (counted in layer-tokens) is used up. To resume is to go to row N.
Paper: "DeepSpeed Data Efficiency", arXiv 2212.03597.
"""
import contextlib
import dataclasses
import inspect
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import curriculum
import data
import ltd
from model import GPT, SIZES, forward_flops
from plan import make_plan, print_plan

EMBEDDED = "data/stdlib"


@dataclass
class Config:
    # data
    data: str = ""              # store made by data_analyze.py; empty = the embedded corpus, built when first needed
    # model
    model: str = ""             # named size (gpt2, gpt2-medium, gpt3-1.3b, ...); flags given beside it win
    n_layer: int = 6            # layers
    n_head: int = 4             # attention heads
    n_embd: int = 128           # channels
    block_size: int = 256       # tokens a row: the context length
    pos: str = "learned"        # positions: learned or rotary
    dropout: float = 0.0        # 0 is good for pretraining
    bias: bool = False          # biases in Linear and LayerNorm
    init_std: float = 0.02      # standard deviation of the initial weights
    # budget, batch, optimizer
    train_tokens: int = 2_000_000  # the budget, counted in --budget units
    budget: str = "layer_tokens"  # layer_tokens (compute), tokens (with a loss), or steps (each counted as a plain one)
    global_batch: int = 16      # samples an optimizer step, over all ranks and micro-batches
    batch_size: int = 16        # samples a micro-batch on one rank, at most
    learning_rate: float = 2e-3  # peak
    min_lr: float = 2e-4        # floor of the decay
    warmup_tokens: str = "2%"   # linear warm-up, a number or % of the budget
    decay_tokens: str = "100%"  # where the decay reaches min_lr, a number or % of the budget
    lr_decay: str = "cosine"    # cosine, linear or constant
    lr_unit: str = ""           # what the two above are counted in; empty = as --budget
    weight_decay: float = 0.1   # of matrices and embeddings
    beta1: float = 0.9          # AdamW
    beta2: float = 0.95         # AdamW
    grad_clip: float = 1.0      # global gradient norm, 0 = off
    # efficient data sampling and routing (START..END:DURATION[:SHAPE])
    pool: list = field(default_factory=list)  # METRIC:PACE, repeatable (intersection), or off; default voc:30%..100%:40%:sqrt
    seqlen: str = "truncate:25%..100%:40%"  # truncate:PACE or reshape:PACE in tokens, or off
    seqlen_multiple: int = 8    # lengths are multiples of this
    ltd: str = "25%..100%:70%"  # PACE of the kept tokens of the middle layers, or off
    ltd_multiple: int = 16      # kept tokens are multiples of this
    # system
    device: str = ""            # cpu, cuda, cuda:1; empty = cuda if there is one
    dtype: str = ""             # float32, bfloat16, float16; empty = bfloat16 on a GPU that has it, float16 on one that has not, float32 on a CPU
    compile: bool = False       # torch.compile the model (worth it on a GPU)
    recompute: bool = False     # activation checkpointing: a third more time for much less memory
    deterministic: bool = False  # refuse kernels that are not reproducible on a GPU (a CPU run always is)
    seed: int = 1337            # of the weights, the sampler, the token draw and dropout
    dist_timeout: int = 600     # seconds after which a rank that waits for the others gives up
    # the run
    out: str = "out/default"    # folder of the run
    resume: bool = False        # continue from the newest checkpoint in --out, if there is one
    overwrite: bool = False     # delete the run that --out holds
    eval_interval: int = 100    # steps between evaluations
    eval_samples: int = 256     # validation windows, always the first ones; 0 = all
    save_interval: int = 200    # steps between checkpoints
    keep_ckpts: int = 2         # newest checkpoints to keep
    log_interval: int = 10      # steps between lines on the screen and in log.jsonl
    stop_step: int = 0          # save and end at this step, horizons unchanged; 0 = run to the end
    trace: str = ""             # write one JSON line a step and rank to this file
    wandb: bool = False         # also log to Weights & Biases (offline without a key)
    # instead of training
    plan: bool = False          # print the plan and end
    plot: bool = False          # with --plan: draw it to plan.png
    sample: bool = False        # with --resume: print text from the newest checkpoint and end
    prompt: str = ""            # what the sample begins with
    max_new_tokens: int = 200   # length of a sample
    temperature: float = 0.8    # of a sample; 0 takes the likeliest token
    top_k: int = 200            # sample among this many likeliest tokens


POOL = ["voc:30%..100%:40%:sqrt"]
# a GPU trains this where the flags say nothing; a CPU trains the defaults above
GPU_SIZE = dict(n_layer=12, n_head=8, n_embd=512, global_batch=64, batch_size=64, train_tokens=40_000_000, learning_rate=1e-3, min_lr=1e-4)
# flags that a resumed run may change: they do not touch the plan or the numbers
FREE = {"device", "compile", "recompute", "dist_timeout", "out", "resume", "overwrite", "eval_interval", "save_interval", "keep_ckpts", "data",
        "log_interval", "stop_step", "trace", "wandb", "plan", "plot", "sample", "prompt", "max_new_tokens", "temperature", "top_k", "batch_size"}

# -----------------------------------------------------------------------------
# the pieces of a run


def settle(cfg, given, device):
    """Fill in what was not given: the named model, the larger size for a GPU, the default pool."""
    if cfg.model:
        if cfg.model not in SIZES:
            raise ValueError(f"--model={cfg.model} is unknown; it takes {', '.join(SIZES)}")
        size = dict(zip(("n_layer", "n_embd", "n_head", "block_size", "init_std"), SIZES[cfg.model]))
    else:
        size = GPU_SIZE if device.startswith("cuda") and not given & set(GPU_SIZE) else {}
    for name, value in size.items():
        if name not in given:
            setattr(cfg, name, value)
    if size is GPU_SIZE:
        print0(f"default size for a GPU: {GPU_SIZE}")
    cfg.pool = cfg.pool or list(POOL)


def pick_device(cfg):
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device={device}: torch {torch.__version__} sees no CUDA device; use --device=cpu")
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    dtype = cfg.dtype or ("float32" if device == "cpu" else "bfloat16" if torch.cuda.is_bf16_supported() else "float16")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype={dtype} is unknown; it takes float32, bfloat16 or float16")
    return device, dtype


def plan_of(cfg, store):
    """The Plan of a Config. store: the training split, or None where the data are elsewhere."""
    for flag in ("batch_size", "n_head", "n_embd", "eval_interval", "save_interval", "log_interval", "keep_ckpts"):
        if getattr(cfg, flag) < 1:
            raise ValueError(f"--{flag}={getattr(cfg, flag)} must be at least 1")
    flags = {name: getattr(cfg, name) for name in inspect.signature(make_plan).parameters if hasattr(cfg, name)}
    return make_plan(**flags, column=store and store.column, n_samples=store.n_samples if store else 0)


def print0(*args):
    if int(os.environ.get("RANK", 0)) == 0:
        print(*args, flush=True)


def ensure_embedded(folder=EMBEDDED):
    """Build the embedded corpus: local rank 0 runs the offline command, the others wait for its last file."""
    if (Path(folder) / "meta.json").is_file() and (Path(folder) / "T256" / "voc.json").is_file():
        return
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print0(f"{folder} is missing: building it (python data_analyze.py)")
        if subprocess.run([sys.executable, str(Path(__file__).with_name("data_analyze.py")), "--overwrite", f"--out={folder}"]).returncode:
            raise ValueError(f"{folder} could not be built; see the message above")
    deadline = time.time() + 600
    while not (Path(folder) / "T256" / "voc.json").is_file():
        if time.time() > deadline:
            raise ValueError(f"{folder} did not appear within 600 s; build it with: python data_analyze.py")
        time.sleep(0.5)


def newest_checkpoint(out, map_location="cpu"):
    """The newest checkpoint that opens, as (path, content), or None. torch.load's default opens it: nothing in it can
    run code. One that does not open (a damaged disk: they appear by rename only) is named and passed over."""
    for path in sorted(Path(out).glob("ckpt_*.pt"), reverse=True):
        try:
            return path, torch.load(path, map_location=map_location, weights_only=True)
        except Exception as e:
            print0(f"{path} does not open ({type(e).__name__}: {str(e)[:80]}); trying the one before it")
    return None


def append_line(fd, record):
    """One JSON line in one write, so that ranks can share a file and a kill leaves no half line."""
    os.write(fd, (json.dumps(record) + "\n").encode())


def start_wandb(cfg, extra):
    """A wandb run or None; whatever goes wrong costs one line, never the training. The mode is chosen before the start,
    because wandb cannot fall back once it has begun."""
    try:
        import wandb
        key = os.environ.get("WANDB_API_KEY") or Path("~/.netrc").expanduser().is_file()
        mode = os.environ.get("WANDB_MODE") or ("online" if key else "offline")
        run = wandb.init(project="winnow", name=Path(cfg.out).name, dir=cfg.out, config=dataclasses.asdict(cfg) | extra, mode=mode,
                         settings=wandb.Settings(init_timeout=30))
        run.define_metric("*", step_metric="step")      # a resumed run may log a step twice: the step is data, not wandb's counter
        print0(f"wandb: {mode}")
        return run
    except Exception as e:
        print0(f"wandb: off ({type(e).__name__}: {str(e).splitlines()[0][:100] if str(e) else ''}); log.jsonl has everything")
        return None


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12, "3090": 71e12, "A10": 125e12, "V100": 125e12}


def peak_flops(device):
    """Dense half-precision FLOP/s of the card, by its name; None where it is unknown (then no utilisation is shown)."""
    name = torch.cuda.get_device_name(device) if device != "cpu" else ""
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def git_hash():
    here = Path(__file__).resolve().parent
    try:
        return subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def plot_loss(out):
    """loss.png from log.jsonl: training and validation loss over layer-tokens. Later lines win (a resumed run)."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return print0("loss.png: not drawn, matplotlib is missing")
    records = {(r["step"], "val_loss" in r): r for r in map(json.loads, open(f"{out}/log.jsonl")) if "step" in r}
    _, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    for key, label in (("loss", "training"), ("val_loss", "validation, full length")):
        points = sorted((r["layer_tokens"], r[key]) for r in records.values() if key in r)
        ax.plot(*zip(*points), label=label, linewidth=1)
    ax.set(xlabel="layer-tokens", ylabel="loss (nats a token)")
    ax.legend()
    data.write_atomic(f"{out}/loss.png", lambda f: plt.savefig(f, dpi=120, format="png"))
    plt.close()


# -----------------------------------------------------------------------------
# the run


def main():
    cfg, given = data.parse_flags(Config, sys.argv[1:], "Train a Transformer with curriculum learning and random layerwise token dropping.")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if cfg.sample and not cfg.resume:
        raise ValueError("--sample prints text from a checkpoint: give --resume and the run's --out=FOLDER")
    found = newest_checkpoint(cfg.out) if cfg.resume else None
    if found:
        saved = Config(**found[1]["config"])
        for name in given - FREE:
            if getattr(cfg, name) != getattr(saved, name):
                raise ValueError(f"--{name}={getattr(cfg, name)} differs from {getattr(saved, name)} in {found[0]}; a resumed run keeps its settings: leave the flag out, or start another run with --out=FOLDER")
        cfg = dataclasses.replace(saved, **{name: getattr(cfg, name) for name in FREE & (given | {"resume", "sample", "stop_step", "trace", "out"})})
    elif cfg.sample:
        raise ValueError(f"--out={cfg.out} holds no checkpoint to sample from; train first: python train.py --out={cfg.out}")
    device, dtype = pick_device(cfg)
    if not found:
        cfg.dtype = dtype
        settle(cfg, given, device)
    cfg.data = cfg.data or EMBEDDED
    torch_dtype = getattr(torch, cfg.dtype)

    if cfg.plan:
        have = (Path(cfg.data) / "meta.json").is_file()
        store = data.Store(cfg.data, "train", cfg.block_size) if have else None
        return print_plan(plan_of(cfg, store), cfg.plot)
    if cfg.plot:
        raise ValueError("--plot draws the plan: give it with --plan (a run's loss.png is always drawn)")
    if cfg.data == EMBEDDED:
        ensure_embedded()
    store = data.Store(cfg.data, "train", cfg.block_size)
    if cfg.global_batch < world:
        raise ValueError(f"--global_batch={cfg.global_batch} gives {world} ranks less than one sample each; take at least {world}")
    plan = plan_of(cfg, store)                                  # refuses what cannot run, before anything is written
    tokenizer = data.Tokenizer(json.loads((Path(cfg.data) / "tokenizer.json").read_text())) if (Path(cfg.data) / "tokenizer.json").is_file() else None

    # weights: the same on every rank, whatever the device
    torch.manual_seed(cfg.seed)
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    model = GPT(store.meta["vocab_size"], cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.dropout, cfg.bias, cfg.pos,
                cfg.init_std, cfg.recompute, torch_dtype).to(device)
    if found:
        model.load_state_dict(found[1]["model"])
        if found[1]["step"] == plan.steps and not cfg.sample:
            return print0(f"{found[0]} is the end of its run: nothing is left to do")

    def sample(prompt, n):
        """n tokens after the prompt, decoded; the same for the same seed."""
        start = [store.meta["eot_id"], *(tokenizer.encode(prompt).tolist() if prompt and tokenizer else [])]
        g = torch.Generator(device).manual_seed(cfg.seed)
        ids = model.generate(torch.tensor([start], device=device), n, cfg.temperature, cfg.top_k, g)[0, 1:].tolist()
        return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
    if cfg.sample:
        return print(sample(cfg.prompt, cfg.max_new_tokens))

    out = Path(cfg.out)
    started = (out / "log.jsonl").exists()
    if started and not cfg.resume and not cfg.overwrite:
        raise ValueError(f"--out={out} holds a run already: --resume continues it, --overwrite deletes it, another --out keeps it")
    val = data.Store(cfg.data, "val", cfg.block_size)
    n_eval = min(cfg.eval_samples or val.n_samples, val.n_samples)
    if world > 1:
        dist.init_process_group("nccl" if device != "cpu" else "gloo", timeout=timedelta(seconds=cfg.dist_timeout))
    if rank == 0:
        if cfg.overwrite and not cfg.resume:
            shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        for stale in out.glob("*.tmp"):                 # what a killed process was writing
            stale.unlink()
        if cfg.trace and not found:
            Path(cfg.trace).unlink(missing_ok=True)
        config = dataclasses.asdict(cfg)
        data.write_atomic(out / "config.json", lambda f: f.write(json.dumps(config, indent=1).encode()))
    if world > 1:
        dist.barrier()
    log = os.open(out / "log.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    trace = os.open(cfg.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if cfg.trace else None

    decay = [p for p in model.parameters() if p.dim() > 1]
    groups = [dict(params=decay, weight_decay=cfg.weight_decay), dict(params=[p for p in model.parameters() if p.dim() <= 1], weight_decay=0.0)]
    params = [p for g in groups for p in g["params"]]
    assert len(params) == len(list(model.parameters())), "every parameter belongs to exactly one group"
    optimizer = torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=True)
    start, seconds, scale, good = 0, 0.0, 2.0**16 if cfg.dtype == "float16" else 1.0, 0
    if found:
        start, seconds, (scale, good) = found[1]["step"], found[1]["seconds"], found[1]["scaler"]
        optimizer.load_state_dict(found[1]["optimizer"])
        print0(f"resumed from {found[0]} at step {start}")
        found = None
    elif cfg.resume:
        print0(f"{out} holds no checkpoint: starting from step 0")
    if cfg.compile:
        model.compile()                                 # in place: the keys of a checkpoint stay clean
    net = DistributedDataParallel(model, device_ids=None if device == "cpu" else [torch.device(device)]) if world > 1 else model

    about = {"git": git_hash(), "torch": torch.__version__, "python": sys.version.split()[0], "device": device if device == "cpu" else torch.cuda.get_device_name(device),
             "world": world, "params": model.n_params(), "fingerprint": store.meta["fingerprint"], "steps": plan.steps, "samples": store.n_samples}
    print0(f"{model.n_params():,} parameters | {about['device']} x {world}, {cfg.dtype} | data {cfg.data} ({store.meta['fingerprint']}, {store.n_samples:,} samples of {cfg.block_size}) | "
           f"{plan.steps} steps (plain: {plan.plain_steps})\nltd: {'off' if cfg.ltd == 'off' else 'torch path'} | pool {' '.join(cfg.pool)} | seqlen {cfg.seqlen} | ltd {cfg.ltd}")
    run = start_wandb(cfg, about) if cfg.wandb and rank == 0 else None
    if rank == 0:
        append_line(log, {"config": dataclasses.asdict(cfg), **about, "start": start})

    sampler = curriculum.Sampler(store.n_samples, cfg.global_batch, cfg.seed, plan.admitted)
    first, last = cfg.global_batch * rank // world, cfg.global_batch * (rank + 1) // world      # this rank's share of the samples

    def make_batch(step):
        ids = sampler.ids(step)[first:last]
        rows = store.rows(ids)                                                                   # (b, T+1)
        x, y = (curriculum.reshape if plan.mode == "reshape" else curriculum.truncate)(rows, int(plan.length[step]))
        pieces = len(x) // len(ids)
        place = np.arange(first * pieces, last * pieces)                                         # the rows' places in the global batch
        tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in (x, y, place)]
        return ids, pieces, [t.pin_memory() for t in tensors] if device != "cpu" else tensors

    @torch.no_grad()
    def evaluate():
        """Mean loss over the same first n_eval validation windows: full length, all tokens, each rank a share."""
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=device)
        mine = range(n_eval * rank // world, n_eval * (rank + 1) // world)
        for i in range(mine.start, mine.stop, cfg.batch_size):
            rows = torch.from_numpy(val.rows(np.arange(i, min(i + cfg.batch_size, mine.stop)))).to(device)
            total += model(rows[:, :-1], rows[:, 1:])
        model.train()
        if world > 1:
            dist.all_reduce(total)
        return total.item() / (n_eval * cfg.block_size)

    def save(step):
        path = out / f"ckpt_{step:07d}.pt"
        content = {"step": step, "seconds": seconds, "scaler": [scale, good], "config": dataclasses.asdict(cfg),
                   "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        data.write_atomic(path, lambda f: torch.save(content, f))
        for old in sorted(out.glob("ckpt_*.pt"))[:-cfg.keep_ckpts or None]:
            old.unlink()

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    n_ltd = len(model.ltd_layers) if cfg.ltd != "off" else 0
    flops = [3 * r * forward_flops(cfg.n_layer, cfg.n_embd, store.meta["vocab_size"], int(T), int(K), n_ltd)
             for r, T, K in zip(plan.rows, plan.length, plan.keep)]     # backward = 2 x forward
    peak = peak_flops(device)
    batches = data.prefetch(make_batch, start, plan.steps)
    bad, skipped, val_loss, speed, last_save = 0, 0, math.nan, [], start
    model.train()
    for step in range(start, plan.steps + 1):
        end = step == plan.steps or (step > start and (bool(stop) or step == cfg.stop_step))
        if (step % cfg.eval_interval == 0 and step > start) or step == 0 or end:
            val_loss = evaluate()
            print0(f"step {step:05d}/{plan.steps:05d} | validation loss {val_loss:.4f}")
            record = {"step": step, "val_loss": val_loss, "seconds": seconds, **{k: int(v[step]) for k, v in plan.spent.items()}}
            if rank == 0:
                append_line(log, record)
                run and run.log(record)
        if rank == 0 and not bad and step > last_save and (step % cfg.save_interval == 0 or end):
            save(step)
            last_save = step
        if end:
            break

        # one optimizer step
        t0 = time.perf_counter()
        ids, pieces, tensors = next(batches)
        x, y, place = (t.to(device, non_blocking=True) for t in tensors)
        T, K, n = int(plan.length[step]), int(plan.keep[step]), int(plan.tokens[step])
        micro = cfg.batch_size * pieces
        total, hashes = torch.zeros((), device=device), []
        for i in range(0, len(x), micro):
            part = slice(i, i + micro)
            keep = ltd.draw(cfg.seed, step, place[part], model.ltd_layers, T, K) if K < T else None
            if cfg.dropout:     # masks follow from (seed, step, row), so a resume needs no generator's state and ranks agree with one process
                torch.manual_seed(hash((cfg.seed, step, first * pieces + i)) & 0x7FFFFFFFFFFFFFFF)
            with net.no_sync() if world > 1 and i + micro < len(x) else contextlib.nullcontext():
                loss = net(x[part], y[part], keep)
                (loss * (world * scale / n)).backward()     # sum over the global batch / its targets; DDP divides by world
            total += loss.detach()
            if trace is not None:
                hashes += [0] * len(x[part]) if keep is None else [zlib.crc32(k.tobytes()) for k in keep.cpu().numpy()]
        if world > 1:           # one message carries the loss and whether somebody was told to stop
            message = torch.stack((total.double(), torch.tensor(float(bool(stop)), dtype=torch.float64, device=device)))
            dist.all_reduce(message)
            total, stopping = message.tolist()
            stop += [True] * (stopping > 0 and not stop)
        grads = [p.grad for p in params]
        norm = torch.nn.utils.get_total_norm(grads).item() / scale      # a sync point, and equal on all ranks: so is what follows
        if math.isfinite(norm):
            coefficient = min(1.0, cfg.grad_clip / (norm + 1e-6) if cfg.grad_clip else 1.0) / scale
            if coefficient != 1.0:
                torch._foreach_mul_(grads, coefficient)
            for group in optimizer.param_groups:
                group["lr"] = float(plan.lr[step])
            optimizer.step()
            bad, good = 0, good + 1
            if cfg.dtype == "float16" and good % 2000 == 0:
                scale *= 2
        else:                   # the step is spent, the weights are untouched
            bad, skipped, good = bad + 1, skipped + 1, 0
            scale = max(1.0, scale / 2) if cfg.dtype == "float16" else scale
            if bad == 10:
                kept = sorted(out.glob("ckpt_*.pt"))
                sys.exit(f"error: 10 steps in a row gave no finite gradient, the last at step {step}; the last good checkpoint is "
                         f"{kept[-1] if kept else '(none was saved)'}: lower --learning_rate (now {plan.lr[step]:.2g}) and resume or start again")
        optimizer.zero_grad(set_to_none=True)
        mean = float(total) / n
        dt = time.perf_counter() - t0
        seconds += dt
        speed = (speed + [(dt, n, flops[step])])[-20:] if step > start + 2 else []       # the first steps warm caches up
        if trace is not None:
            append_line(trace, {"step": step, "rank": rank, "sample_ids": ids.tolist(), "difficulty": {k: float(v[step]) for k, v in plan.limits.items()},
                                "ltd_keep": K, "ltd_hash": hashes, "lr": float(plan.lr[step]), "tokens_seen": int(plan.spent["tokens"][step + 1]),
                                "layer_tokens": int(plan.spent["layer_tokens"][step + 1]), "loss": mean})
        if rank == 0 and step % cfg.log_interval == 0:
            busy, fed, work = map(sum, zip(*speed)) if speed else (dt, n, flops[step])
            record = {"step": step, "loss": mean, "lr": float(plan.lr[step]), "pool": int(plan.pool[step]), "length": T, "keep": K, "norm": norm, "skipped": skipped,
                      "ms": dt * 1e3, "tok_s": fed / busy, "seconds": seconds, **{k: int(v[step + 1]) for k, v in plan.spent.items()}}
            record |= {"mfu": work / busy / (peak * world)} if peak else {}
            mfu = f"mfu {record['mfu']:.1%} | " if peak else ""
            eta = sum(flops[step + 1:]) / (work / busy)
            print(f"step {step:05d}/{plan.steps:05d} | loss {mean:.4f} | lr {plan.lr[step]:.1e} | pool {plan.pool[step] / store.n_samples:.0%} | len {T} | keep {K}/{T} | "
                  f"{dt * 1e3:.0f} ms | {fed / busy / 1e6:.3f}M tok/s | {mfu}eta {eta / 60:.0f}m{f' | {skipped} skipped' if skipped else ''}", flush=True)
            append_line(log, record)
            run and run.log(record)

    batches.close()
    if rank == 0:
        plot_loss(out)
        if step == plan.steps:
            print(f"\n{sample(cfg.prompt, cfg.max_new_tokens)}\n")
        result = {"val_loss": round(val_loss, 4), "tokens_sampled": int(plan.spent["sampled"][step]), "tokens_with_loss": int(plan.spent["tokens"][step]),
                  "layer_tokens": int(plan.spent["layer_tokens"][step]), "seconds": round(seconds, 1), "steps": f"{step} of {plan.steps}", "skipped": skipped,
                  "peak_memory_mb": round(torch.cuda.max_memory_allocated() / 2**20) if device != "cpu" else None, "corpus": store.meta["fingerprint"], "out": str(out)}
        print("---\n" + "\n".join(f"{k}: {v}" for k, v in result.items() if v is not None), flush=True)
        run and run.finish()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    data.run_command(main)
