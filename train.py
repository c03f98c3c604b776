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
import re
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
import ds_config
import ltd
from flags import parse_flags, run_command
from model import GPT, SIZES, forward_flops
from output import (append_line, device_name, git_hash, newest_checkpoint, peak_flops, plot_loss, print0,
                    prune_checkpoints, read_log, save_checkpoint, start_wandb, wandb_log)
from plan import check as check_words
from plan import make_plan, print_plan
from tokenizer import load_tokenizer

EMBEDDED = "data/stdlib"


@dataclass
class Config:
    # data
    data: str = ""              # store made by data_analyze.py; empty = the embedded corpus, built when first needed
    samples: str = "window"     # window (of the token stream) or document (one a sample, cut or padded to block_size)
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
    learning_rate: float = 4e-3  # peak; the best of those tried with everything on (a dense run wants half of it)
    min_lr: float = -1.0        # floor of the decay; negative = a tenth of the peak
    warmup_tokens: str = "2%"   # linear warm-up, a number or % of the budget
    decay_tokens: str = "100%"  # where the decay reaches min_lr, a number or % of the budget
    lr_decay: str = "cosine"    # cosine, linear or constant
    lr_unit: str = ""           # what the two above are counted in; empty = as --budget
    weight_decay: float = 0.1   # of matrices and embeddings
    beta1: float = 0.9          # AdamW
    beta2: float = 0.95         # AdamW
    grad_clip: float = 1.0      # global gradient norm, 0 = off
    # efficient data sampling and routing (START..END:DURATION[:SHAPE])
    pool: list = field(default_factory=list)  # METRIC:PACE (repeats intersect), or off; default voc:30%..100%:40%:sqrt
    pool_order: str = "easy_first"  # easy_first, or the controls hard_first and random
    seqlen: str = "truncate:25%..100%:40%"  # truncate:PACE or reshape:PACE in tokens, or off
    seqlen_multiple: int = 8    # lengths are multiples of this
    ltd: str = "25%..100%:70%"  # PACE of the kept tokens of the middle layers, or off
    ltd_multiple: int = 16      # kept tokens are multiples of this
    ltd_dense: str = "ends"     # which ends of the stack drop nothing: ends (both), first, last, none
    ltd_redraw: str = "layer"   # draw afresh for every layer, or once for all of them
    ltd_choice: str = "random"  # random, or importance: TokenBypass, by the running loss of each token id
    batch_ramp: bool = False    # control: spend what --seqlen and --ltd would spend a step on fewer whole dense samples
    ltd_kernel: str = "auto"    # auto (the CUDA kernel where it can be built), cuda (or refuse), torch
    # system
    device: str = ""            # cpu, cuda, cuda:1; empty = cuda if there is one
    dtype: str = ""             # float32, bfloat16, float16; empty = the GPU's best half precision, float32 on a CPU
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
    eval_samples: int = 256     # validation windows, always the same, spread evenly over the split; 0 = all
    save_interval: int = 200    # steps between checkpoints
    keep_ckpts: int = 2         # newest checkpoints to keep
    log_interval: int = 10      # steps between lines on the screen and in log.jsonl
    stop_step: int = 0          # save and end at this step, horizons unchanged; 0 = run to the end
    trace: str = ""             # write one JSON line a step and rank to this file
    wandb: bool = False         # also log to Weights & Biases (offline without a key)
    wandb_group: str = ""       # the run's group there
    ds_config: str = ""         # a DeepSpeed JSON file: its data_efficiency section, as flags; those given here win
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
GPU_SIZE = dict(n_layer=12, n_head=8, n_embd=512, global_batch=64, batch_size=64,
                train_tokens=40_000_000, learning_rate=1e-3)
# flags that belong to one call of the command, and those that a resumed run may change: neither touches plan or numbers
CALL = {"out", "resume", "overwrite", "stop_step", "trace", "plan", "plot", "sample", "ds_config"}
FREE = CALL | {"data", "device", "batch_size", "compile", "recompute", "eval_interval", "save_interval", "log_interval",
               "keep_ckpts", "ltd_kernel", "dist_timeout", "wandb", "wandb_group", "prompt", "max_new_tokens",
               "temperature", "top_k"}

# -----------------------------------------------------------------------------
# settings: what the flags, the device and a checkpoint make of a Config


def pick_device(cfg):
    """(device, dtype) by name; both are chosen after all flags are read, and a CPU run never calls CUDA for it."""
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device={device} is unknown; it takes cpu, cuda or cuda:N")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device={device}: torch {torch.__version__} sees no CUDA device; use --device=cpu")
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    # bfloat16 in hardware begins with compute capability 8; torch itself also says yes where it emulates it slowly
    half = ("float32" if device == "cpu" else
            "bfloat16" if torch.cuda.get_device_capability(device)[0] >= 8 else "float16")
    return device, cfg.dtype or half


RANGES = {  # flag: (least, most); a bound in a string is left out itself
    **{flag: (1, math.inf) for flag in ("batch_size", "n_head", "n_embd", "n_layer", "block_size", "eval_interval",
                                        "save_interval", "keep_ckpts", "log_interval", "dist_timeout", "train_tokens")},
    **{flag: (0, math.inf) for flag in ("seed", "eval_samples", "stop_step", "max_new_tokens", "temperature", "top_k",
                                        "weight_decay", "grad_clip", "init_std", "learning_rate", "min_lr")},
    "dropout": (0, "1"), "beta1": (0, "1"), "beta2": (0, "1")}


def check(cfg, given, world):
    """Refuse what is out of range or would have no effect, before anything is read or written."""
    for flag, (least, most) in RANGES.items():
        value = getattr(cfg, flag)
        if not (least <= value < float(most) if isinstance(most, str) else least <= value <= most):
            bound = "" if most == math.inf else f" and below {most}"
            raise ValueError(f"--{flag}={value} must be at least {least}{bound}")
    if cfg.dtype not in ("", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype={cfg.dtype} is unknown; it takes float32, bfloat16 or float16")
    if cfg.min_lr > cfg.learning_rate:
        raise ValueError(f"--min_lr={cfg.min_lr:g} must not be above --learning_rate={cfg.learning_rate:g}")
    if cfg.global_batch < world:
        raise ValueError(f"--global_batch={cfg.global_batch} leaves some of the {world} ranks without a sample; "
                         f"take {world} or more")
    if cfg.trace and not Path(cfg.trace).absolute().parent.is_dir():
        raise ValueError(f"--trace={cfg.trace}: its folder does not exist; make it first")
    check_words(ltd_redraw=(cfg.ltd_redraw, ("layer", "once")), ltd_choice=(cfg.ltd_choice, ("random", "importance")))
    for idle, flags, why in ((cfg.ltd == "off", [f for f in given if f.startswith("ltd_")], "--ltd=off"),
                             (cfg.ltd_choice == "importance", ("ltd_redraw",), "--ltd_choice=importance"),
                             (not cfg.wandb, ("wandb_group",), "no --wandb"),
                             (cfg.seqlen == "off", ("seqlen_multiple",), "--seqlen=off"),
                             (cfg.pool == ["off"], ("pool_order",), "--pool=off"),
                             (cfg.lr_decay == "constant", ("min_lr", "decay_tokens"), "--lr_decay=constant"),
                             (cfg.resume, ("overwrite",), "--resume"), (not cfg.plan, ("plot",), "no --plan")):
        for flag in set(flags) & given:
            if idle:
                raise ValueError(f"--{flag} has no effect with {why}; leave one of the two out")


def settle(cfg, given, device):
    """Fill in what the flags left open: the named model, the larger size for a GPU, the default pool, the data."""
    size = {}
    if cfg.model:
        if cfg.model not in SIZES:
            raise ValueError(f"--model={cfg.model} is unknown; it takes {', '.join(SIZES)}")
        size = dict(zip(("n_layer", "n_embd", "n_head", "block_size", "init_std"), SIZES[cfg.model]))
        if "n_layer" in given and cfg.n_layer != size["n_layer"]:
            raise ValueError(f"--model={cfg.model} has {size['n_layer']} layers, not {cfg.n_layer}; leave out --model, "
                             "or --n_layer (with --ds_config: total_layer_num)")
    elif device != "cpu" and not given & {"n_layer", "n_head", "n_embd"}:
        size = GPU_SIZE
        print0(f"default size for a GPU: {GPU_SIZE}")
    for name in size.keys() - given:
        setattr(cfg, name, size[name])
    cfg.pool, cfg.data = cfg.pool or list(POOL), cfg.data or EMBEDDED
    cfg.min_lr = cfg.min_lr if cfg.min_lr >= 0 else cfg.learning_rate / 10


def resumed(cfg, given, path, saved):
    """The Config of a resumed run: the saved one, with the flags in FREE as given now. Refuses any other change."""
    saved = Config(**saved)
    free = FREE - ({"batch_size", "compile"} if saved.dropout else set())       # they move the masks of dropout
    for name in given - free:
        if getattr(cfg, name) != getattr(saved, name):
            raise ValueError(f"--{name}={getattr(cfg, name)} differs from {getattr(saved, name)} in {path}; a resumed "
                             "run keeps its settings: leave the flag out, or start another run with another --out")
    return dataclasses.replace(saved, **{name: getattr(cfg, name) for name in given & free | CALL})


def plan_of(cfg, store):
    """The Plan of a Config. store: the training split, or None where the data are elsewhere."""
    flags = {name: getattr(cfg, name) for name in inspect.signature(make_plan).parameters if hasattr(cfg, name)}
    return make_plan(**flags, store=store)


def ensure_embedded(cfg):
    """Make what is missing of the embedded corpus, its tokens or this block size's difficulties, by the offline
    command: local rank 0 does, before there is a process group, and the others wait for the last file."""
    folder = f"T{cfg.block_size}" + "-documents" * (cfg.samples == "document")
    meta, last = Path(EMBEDDED) / "meta.json", Path(EMBEDDED) / folder / "voc.json"
    if meta.is_file() and (last.is_file() or cfg.pool == ["off"]):
        return
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        what = [f"--data={EMBEDDED}"] if meta.is_file() else []
        command = ["data_analyze.py", *what, f"--block_size={cfg.block_size}", f"--samples={cfg.samples}"]
        print0(f"making the embedded corpus: python {' '.join(command)}")
        here = Path(__file__).resolve().parent
        if subprocess.run([sys.executable, str(here / command[0]), *command[1:]]).returncode and not last.is_file():
            raise ValueError(f"{EMBEDDED} could not be made; see the message above")
    deadline = time.time() + cfg.dist_timeout
    while not last.is_file():
        if time.time() > deadline:
            raise ValueError(f"{last} did not appear within {cfg.dist_timeout} s; make it with: python data_analyze.py")
        time.sleep(0.5)


# -----------------------------------------------------------------------------
# the run


def main():
    cfg, given = parse_flags(Config, sys.argv[1:], __doc__.splitlines()[0])
    if cfg.ds_config:
        cfg, given = parse_flags(Config, ds_config.command_line(cfg, given), "")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if cfg.sample and not cfg.resume:
        raise ValueError("--sample prints text from a checkpoint: give --resume and the run's --out=FOLDER")
    found = newest_checkpoint(cfg.out) if cfg.resume else None
    if cfg.resume and not found and given <= CALL:
        raise ValueError(f"--out={cfg.out} holds no checkpoint to resume from; to start a run that a later call may "
                         "resume, give its settings with --resume")
    if found:
        path, checkpoint = found
        cfg = resumed(cfg, given, path, checkpoint["config"])
        device, _ = pick_device(cfg)
    elif cfg.sample:
        raise ValueError(f"--out={cfg.out} holds no checkpoint to sample from; "
                         f"train first: python train.py --out={cfg.out}")
    else:
        device, dtype = pick_device(cfg)
        settle(cfg, given, device)
    check(cfg, given, world)
    if not found:
        cfg.dtype = dtype
    if cfg.plan:
        store = data.Store(cfg.data, "train", cfg.block_size, cfg.samples) if Path(cfg.data).is_dir() else None
        return print_plan(plan_of(cfg, store), cfg.plot)

    # everything that can be refused is refused here, before anything is written
    if cfg.data == EMBEDDED:
        ensure_embedded(cfg)
    store = data.Store(cfg.data, "train", cfg.block_size, cfg.samples)
    fingerprint = store.meta["fingerprint"]
    if found and checkpoint["fingerprint"] != fingerprint:
        raise ValueError(f"{path} was trained on other data ({checkpoint['fingerprint']}) than {cfg.data} "
                         f"({fingerprint}); give its --data=FOLDER")
    plan = plan_of(cfg, store)
    if plan.batch.min() < world:
        raise ValueError(f"step {plan.batch.argmin()} has {plan.batch.min()} samples for {world} ranks; "
                         "take fewer ranks, or a larger --global_batch")
    tokenizer = load_tokenizer(cfg.data)
    out = Path(cfg.out)
    if ((out / "log.jsonl").exists() or list(out.glob("ckpt_*.pt"))) and not cfg.resume and not cfg.overwrite:
        raise ValueError(f"--out={out} holds a run already: --resume continues it, --overwrite deletes it, "
                         "another --out keeps it")

    torch.manual_seed(cfg.seed)         # before the weights are drawn: they are the same on every rank and device
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    kernel = "off" if cfg.ltd == "off" else ltd.load_kernel(cfg.ltd_kernel, device)
    model = GPT(store.meta["vocab_size"], cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.dropout, cfg.bias,
                cfg.pos, cfg.init_std, cfg.recompute, getattr(torch, cfg.dtype), plan.ltd_layers).to(device)
    if found:
        model.load_state_dict(checkpoint["model"])

    def sample():
        """Text after the prompt; the same for the same seed."""
        prompt = tokenizer.encode(cfg.prompt).tolist() if tokenizer and cfg.prompt else []
        start = torch.tensor([[store.meta["eot_id"], *prompt]], device=device)
        g = torch.Generator(device).manual_seed(cfg.seed)
        ids = model.generate(start, cfg.max_new_tokens, cfg.temperature, cfg.top_k, g)[0, 1:].tolist()
        return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
    if cfg.sample:
        return print(sample())
    if found and checkpoint["step"] == plan.steps and plan.steps in read_log(out)[2]:
        return print0(f"{path} is the end of its run: nothing is left to do")
    val = data.Store(cfg.data, "val", cfg.block_size)
    n_eval = min(cfg.eval_samples or val.n_samples, val.n_samples)
    windows = np.arange(n_eval) * val.n_samples // n_eval

    # the other ranks, and the folder
    start = checkpoint["step"] if found else 0
    if world > 1:
        dist.init_process_group("nccl" if device != "cpu" else "gloo", timeout=timedelta(seconds=cfg.dist_timeout))
        all_views, mine = [None] * world, (start, fingerprint, plan.steps, n_eval)
        dist.all_gather_object(all_views, mine)
        if any(view != all_views[0] for view in all_views):
            raise ValueError(f"the ranks see different runs (checkpoint's step, data, steps, windows): {all_views}; "
                             "every rank needs the same --data and the checkpoints in --out: share the folder, "
                             "or copy it to every host")
    log = trace = None
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        old = [] if found else [*out.glob("ckpt_*.pt"), out / "log.jsonl", out / "loss.png"]
        for stale in [*out.glob("*.tmp"), *old]:
            stale.unlink(missing_ok=True)               # what a killed process was writing, an overwritten run left
        if cfg.trace and not found:
            Path(cfg.trace).unlink(missing_ok=True)
        settings = json.dumps(dataclasses.asdict(cfg), indent=1).encode()
        data.write_atomic(out / "config.json", lambda f: f.write(settings))
        log = os.open(out / "log.jsonl", flags)
    if world > 1:
        dist.barrier()                                  # the trace is opened behind its removal
    if cfg.trace:
        trace = os.open(cfg.trace, flags)

    # the optimizer, and what a resumed run brings along
    params = sorted(model.parameters(), key=lambda p: p.dim() <= 1)                             # matrices first
    n_matrices = sum(p.dim() > 1 for p in params)
    groups = [dict(params=params[:n_matrices], weight_decay=cfg.weight_decay),
              dict(params=params[n_matrices:], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=True)
    seconds, skipped, scale, good = 0.0, 0, 2.0**16 if cfg.dtype == "float16" else 1.0, 0  # scale: of a float16 loss
    score = by_id = None                                # TokenBypass: the running loss of every token id
    if cfg.ltd_choice == "importance":
        score, by_id = (torch.zeros(*shape, store.meta["vocab_size"], dtype=torch.float64, device=device)
                        for shape in ((), (2,)))
    if found:
        seconds, skipped, scale, good = (checkpoint[k] for k in ("seconds", "skipped", "scale", "good"))
        optimizer.load_state_dict(checkpoint["optimizer"])
        if score is not None:
            score.copy_(checkpoint["score"])
        del checkpoint, found
        print0(f"resumed from {path} at step {start}")
    elif cfg.resume:
        print0(f"{out} holds no checkpoint: starting from step 0")
    if cfg.compile:
        model.compile()                                 # in place: the keys of a checkpoint stay clean
    net = model
    if world > 1:
        net = DistributedDataParallel(model, device_ids=None if device == "cpu" else [torch.device(device)])

    about = dict(git=git_hash(), torch=torch.__version__, python=sys.version.split()[0], device=device_name(device),
                 world=world, params=model.n_params(), fingerprint=fingerprint, steps=plan.steps)
    print0(f"{about['params']:,} parameters | {about['device']} x {world}, {cfg.dtype} | "
           f"data {cfg.data} ({fingerprint}), {store.n_samples:,} samples of {cfg.block_size} | "
           f"{plan.steps} steps (plain: {plan.plain_steps})\n"
           f"pool {' '.join(cfg.pool)} | seqlen {cfg.seqlen} | ltd {cfg.ltd}\nltd: {kernel}")
    run = start_wandb(out, dataclasses.asdict(cfg) | about, cfg.wandb_group) if cfg.wandb and rank == 0 else None
    if rank == 0:
        append_line(log, {"config": dataclasses.asdict(cfg), **about, "start": start})

    def record_line(record):
        if rank == 0:
            append_line(log, record)
            wandb_log(run, record)

    # the data: every rank draws the global batch and takes its share, so that ranks agree without talking
    def make_batch(step):
        first, last = (int(plan.batch[step]) * r // world for r in (rank, rank + 1))
        ids = plan.sampler.ids(step)[first:last]
        cut = curriculum.reshape if plan.mode == "reshape" else curriculum.truncate
        x, y = cut(store.rows(ids), int(plan.length[step]))                         # (b, T+1) -> (b*pieces, L) twice
        pieces = len(x) // len(ids)
        place = np.arange(first * pieces, last * pieces)                            # of the rows in the global batch
        tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in (x, y, place)]
        return ids, pieces, first, [t.pin_memory() for t in tensors] if device != "cpu" else tensors

    @torch.no_grad()
    def evaluate():
        """Mean loss over the same n_eval validation windows: full length, all tokens, each rank a share."""
        model.eval()
        total, stop = torch.zeros((), dtype=torch.float64, device=device), n_eval * (rank + 1) // world
        for i in range(n_eval * rank // world, stop, cfg.batch_size):
            rows = torch.from_numpy(val.rows(windows[i:min(i + cfg.batch_size, stop)])).to(device)
            total += model(rows[:, :-1], rows[:, 1:])
        model.train()
        if world > 1:
            dist.all_reduce(total)
        return total.item() / (n_eval * cfg.block_size)

    told = []                                           # SIGTERM: save and end after the step under way
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    n_ltd, vocab_size = len(plan.ltd_layers), store.meta["vocab_size"]
    layers = torch.tensor(plan.ltd_layers, device=device)
    if cfg.ltd_redraw == "once":                        # the draw is keyed on the layer: one key, one draw
        layers = layers[:1].repeat(n_ltd)
    # backward costs twice the forward pass
    flops = np.array([3 * r * forward_flops(cfg.n_layer, cfg.n_embd, vocab_size, T, K, n_ltd)
                      for r, T, K in zip(plan.rows.tolist(), plan.length.tolist(), plan.keep.tolist())], float)
    peak = peak_flops(device) * world
    batches = data.prefetch(make_batch, start, plan.steps)
    bad, recent, val_loss, saved, sound, stop = 0, [], math.nan, start, start, False
    model.train()
    for step in range(start, plan.steps + 1):
        spent = {name: int(sums[step]) for name, sums in plan.spent.items()}
        end = step == plan.steps or stop or 0 < cfg.stop_step <= step
        # weights that gave no finite gradient are not worth keeping; with float16 a scale too high is the usual reason
        if rank == 0 and step > saved and (end or step % cfg.save_interval == 0) and (not bad or scale > 1):
            save_checkpoint(out, {"step": step, "seconds": seconds, "skipped": skipped, "scale": scale, "good": good,
                                  "fingerprint": fingerprint, "config": dataclasses.asdict(cfg),
                                  "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                                  **({} if score is None else {"score": score})})
            saved = step
        if (end or step % cfg.eval_interval == 0) and not stop:
            val_loss = evaluate()
            print0(f"step {step:05d}/{plan.steps:05d} | validation loss {val_loss:.4f}")
            record_line({"step": step, "val_loss": val_loss, "seconds": seconds, "flops": flops[:step].sum(), **spent})
        if end:
            break

        # forward and backward, micro-batch by micro-batch
        t0 = time.perf_counter()
        ids, pieces, first, tensors = next(batches)
        x, y, place = (t.to(device, non_blocking=True) for t in tensors)
        T, K, n, lr = int(plan.length[step]), int(plan.keep[step]), int(plan.tokens[step]), float(plan.lr[step])
        micro, total, hashes = cfg.batch_size * pieces, torch.zeros((), device=device), []
        for i in range(0, len(x), micro):
            part = slice(i, i + micro)
            keep = None
            if K < T:
                keep = (ltd.draw(cfg.seed, step, place[part], layers, T, K) if score is None else
                        ltd.important(score, x[part], K, n_ltd))
            # dropout's masks follow from (seed, step, the micro-batch's first row): a resume needs no generator's
            # state, and ranks equal one process wherever their micro-batches begin at the same rows
            if cfg.dropout:
                torch.manual_seed(np.random.SeedSequence((cfg.seed, step, first * pieces + i)).generate_state(1).item())
            with net.no_sync() if world > 1 and i + micro < len(x) else contextlib.nullcontext():
                loss = net(x[part], y[part], keep, "sum" if score is None else "none")
                if score is not None:                   # (b*T,) losses to their target ids
                    loss, each = loss.sum(), torch.stack((loss.detach().double(), (y[part].reshape(-1) >= 0).double()))
                    by_id.index_add_(1, y[part].reshape(-1).clamp(min=0), each)
                (loss * (world * scale / n)).backward()     # sum / targets of the global batch; DDP divides by world
            total += loss.detach()
            if trace is not None:
                hashes += [0] * len(x[part]) if keep is None else [zlib.crc32(k.tobytes()) for k in keep.cpu().numpy()]
        stop = bool(told)
        if world > 1:           # one message: loss and whether any rank was told to stop, so that all stop at one step
            message = torch.stack((total.double(), torch.tensor(float(stop), dtype=torch.float64, device=device)))
            dist.all_reduce(message)
            total, stop = message[0], bool(message[1] > 0)

        if score is not None:
            if world > 1:
                dist.all_reduce(by_id)
            ltd.rescore(score, by_id)
            by_id.zero_()

        # clip and update, or skip: the norm is the same on all ranks, and so is what follows from it. It costs a sync
        grads = [p.grad for p in params]
        norm = torch.nn.utils.get_total_norm(grads).item() / scale
        if math.isfinite(norm):
            factor = (min(1.0, cfg.grad_clip / (norm + 1e-6)) if cfg.grad_clip else 1.0) / scale
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            bad, good, sound = 0, good + 1, step            # the weights that this step began with are sound
            if rank == 0 and saved == step:
                prune_checkpoints(out, cfg.keep_ckpts)
            if cfg.dtype == "float16" and good % 2000 == 0:
                scale *= 2
        else:                   # the step is spent, the weights are untouched
            bad, skipped, good = bad + 1, skipped + 1, 0
            scale = max(1.0, scale / 2) if cfg.dtype == "float16" else scale
            if bad == 10:
                kept = prune_checkpoints(out, cfg.keep_ckpts, sound) if rank == 0 else []
                newest = kept[-1] if kept else "(none was saved)"
                sys.exit(f"error: 10 steps in a row gave no finite gradient, the last at step {step}; the last good "
                         f"checkpoint is {newest}: lower --learning_rate (now {lr:.2g}) and start again")
        optimizer.zero_grad(set_to_none=True)
        mean, dt = float(total) / n, time.perf_counter() - t0
        seconds += dt

        # tell
        spent = {name: int(sums[step + 1]) for name, sums in plan.spent.items()}
        if step > start + 2:                            # the first steps warm caches up
            recent = (recent + [(dt, n, flops[step])])[-20:]
        if trace is not None:
            append_line(trace, dict(step=step, rank=rank, sample_ids=ids.tolist(), ltd_keep=K, ltd_hash=hashes, lr=lr,
                                    difficulty={k: float(v[step]) for k, v in plan.limits.items()},
                                    tokens_seen=spent["tokens"], layer_tokens=spent["layer_tokens"], loss=mean))
        if rank == 0 and step % cfg.log_interval == 0:
            busy, fed, work = map(sum, zip(*(recent or [(dt, n, flops[step])])))
            mfu = work / busy / peak
            eta = flops[step + 1:].sum() / (work / busy) / 60
            print(f"step {step:05d}/{plan.steps:05d} | loss {mean:.4f} | lr {lr:.1e} | "
                  f"pool {plan.pool[step] / store.n_samples:.0%} | len {T} | keep {K}/{T} | {dt * 1e3:.0f} ms | "
                  f"{fed / busy / 1e6:.3f}M tok/s | " + (f"mfu {mfu:.1%} | " if peak == peak else "")
                  + f"eta {eta:.0f}m" + (f" | {skipped} skipped" if skipped else ""), flush=True)
            record_line({"step": step, "loss": mean, "lr": lr, "pool": int(plan.pool[step]), "length": T, "keep": K,
                         "norm": norm, "skipped": skipped, "ms": dt * 1e3, "tok_s": fed / busy,
                         "mfu": mfu if peak == peak else None, "seconds": seconds, **spent})

    # the end
    batches.close()
    if rank == 0:
        prune_checkpoints(out, cfg.keep_ckpts)
        plot_loss(out)
        if step == plan.steps:
            print(f"\n{sample()}\n")
        memory = {} if device == "cpu" else {"peak_memory_mb": round(torch.cuda.max_memory_allocated() / 2**20)}
        result = dict(val_loss="not evaluated" if stop else f"{val_loss:.4f}", tokens_sampled=spent["sampled"],
                      tokens_with_loss=spent["tokens"], tokens_cut_off=spent["sampled"] - spent["tokens"],
                      layer_tokens=spent["layer_tokens"], seconds=f"{seconds:.1f}", steps=f"{step} of {plan.steps}",
                      skipped=skipped, **memory, corpus=fingerprint, out=out)
        print("---\n" + "\n".join(f"{key}: {value}" for key, value in result.items()), flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    wandb_log(run, None)


if __name__ == "__main__":
    run_command(main)
