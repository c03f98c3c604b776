"""The flags of train.py, and what they, the device and a checkpoint make of them. The components never see a Config."""
import dataclasses
import inspect
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import tasks
from data import EMBEDDED, columns_folder
from model import FAMILIES, IMAGES, RECOMPUTE, SIZES
from output import print0
from parallel import ENGINES, SCHEDULES, STAGES
from plan import check as check_words
from plan import make_plan


@dataclass
class Config:
    # data
    data: str = ""              # store made by data_analyze.py; empty = the embedded corpus, or drawn images for a vit
    samples: str = "window"     # window (of the token stream) or document (one a sample, cut or padded to block_size)
    # model
    model: str = ""             # named size (gpt2, gpt3-1.3b, bert-large, vit-s16, ...); flags given beside it win
    arch: str = "gpt"           # family: gpt, bert or vit; --model and --init_from set it
    n_layer: int = 6            # layers
    n_head: int = 4             # attention heads
    n_embd: int = 128           # channels
    block_size: int = 256       # tokens a row: the context length
    pos: str = "learned"        # positions: learned or rotary
    dropout: float = 0.0        # 0 is good for pretraining
    bias: bool = False          # biases in Linear and LayerNorm; bert and vit have them
    norm: str = "pre"           # LayerNorm before each branch (pre), or behind each sum (post: BERT as published)
    gelu: str = "none"          # its approximation: none, or tanh, with which GPT-2 was trained
    n_expert: int = 0           # mixture of experts: MLPs a layer to choose from; 0 = none
    expert_top_k: int = 1       # experts that each token runs through
    moe_every: int = 2          # every how manyth layer has experts
    moe_balance: float = 0.01   # weight of the loss that evens out the experts' load
    moe_z: float = 0.001        # weight of the loss that keeps the router's logits small
    init_std: float = 0.02      # standard deviation of the initial weights
    init_from: str = ""         # weights to begin with: a folder (GPT-2, BERT, ViT as Hugging Face has them), or a .pt
    mask_prob: float = 0.15     # bert: share of the tokens that are to be found
    nsp: bool = False           # bert: rows are pairs, and whether one follows the other is to be found, too
    image_size: int = 32        # vit: images are scaled to this
    patch_size: int = 4         # vit: a token is a square of this size
    augment: str = "crop,flip"  # vit: shift and mirror training images: crop,flip, crop, flip or none
    # budget, batch, optimizer
    train_tokens: int = 2_000_000  # the budget, counted in --budget units
    budget: str = "layer_tokens"  # layer_tokens (compute), tokens (with a loss), or steps (each counted as a plain one)
    global_batch: int = 16      # samples an optimizer step, over all ranks and micro-batches
    batch_size: int = 16        # samples a micro-batch on one rank, at most
    learning_rate: float = 4e-3  # peak; the best of those tried with everything on (a dense run wants half of it)
    min_lr: float = -1.0        # floor of the decay; negative = a tenth of the peak
    warmup_tokens: str = "2%"   # linear warm-up, a number, % of the budget, or as many as in 100steps
    decay_tokens: str = "100%"  # where the decay reaches min_lr, a number or % of the budget
    lr_decay: str = "cosine"    # cosine, linear or constant
    lr_unit: str = ""           # what the two above are counted in; empty = as --budget
    optimizer: str = "adamw"    # adamw, or sgd with beta1 as its momentum
    weight_decay: float = 0.1   # of matrices and embeddings
    beta1: float = 0.9          # AdamW; momentum of sgd
    beta2: float = 0.95         # AdamW
    eps: float = 1e-8           # AdamW
    grad_clip: float = 1.0      # global gradient norm, 0 = off
    # efficient data sampling and routing (START..END:DURATION[:SHAPE])
    pool: list = field(default_factory=list)  # METRIC:PACE (repeats intersect), or off; default voc:30%..100%:40%:sqrt
    pool_order: str = "easy_first"  # easy_first, or the controls hard_first and random
    seqlen: str = "truncate:25%..100%:40%"  # truncate:PACE or reshape:PACE in tokens, or off
    seqlen_multiple: int = 8    # lengths are multiples of this
    ltd: str = "25%..100%:70%"  # PACE of the kept tokens of the middle layers, or off
    ltd_multiple: int = 16      # kept tokens are multiples of this
    ltd_dense: str = "ends"     # which ends drop nothing: ends (a layer at each), first, last, none, or FRONT,BACK
    ltd_redraw: str = "layer"   # draw afresh for every layer, or once for all of them
    ltd_choice: str = "random"  # random, or importance: TokenBypass, by the running loss of each token id
    batch_ramp: bool = False    # control: spend what --seqlen and --ltd would spend a step on fewer whole dense samples
    ltd_kernel: str = "auto"    # auto (the CUDA kernel where it can be built), cuda (or refuse), torch
    # system
    device: str = ""            # cpu, cuda, cuda:1; empty = cuda if there is one
    dtype: str = ""             # float32, bfloat16, float16; empty = the GPU's best half precision, float32 on a CPU
    compile: bool = False       # torch.compile the model (worth it on a GPU)
    recompute: str = "none"     # activation checkpointing: none, selective (all but products and attention), or block
    parallel: str = "ddp"       # what ranks share: ddp (nothing), zero1, zero2 or zero3 (parallel.py)
    tp: int = 1                 # ranks that share every layer (tensor parallelism)
    pp: int = 1                 # ranks that hold a part of the layers each (pipeline)
    pp_schedule: str = "1f1b"   # of a pipeline's micro-batches: gpipe, 1f1b, or interleaved (two stages a rank)
    offload: str = ""           # cpu: zero1 to zero3's shards wait in the host's memory; disk:FOLDER: AdamW's moments
    loss_scale: str = "65536:2000"  # of float16, START:GROW: doubled every GROW steps, halved where inf; GROW 0 = fixed
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
    ckpt_async: bool = False    # write checkpoints beside the training, as shards, from a copy in the host's memory
    log_interval: int = 10      # steps between lines on the screen and in log.jsonl
    stop_step: int = 0          # save and end at this step, horizons unchanged; 0 = run to the end
    trace: str = ""             # write one JSON line a step and data-parallel rank to this file
    profile: str = ""           # START:STEPS: torch.profiler over these steps, to trace.json in --out, and its summary
    tensorboard: bool = False   # also write TensorBoard's files to --out
    wandb: bool = False         # also log to Weights & Biases (offline without a key)
    wandb_group: str = ""       # the run's group there
    ds_config: str = ""         # a DeepSpeed JSON file: its data_efficiency section, as flags; those given here win
    # instead of training
    plan: bool = False          # print the plan and end
    plot: bool = False          # with --plan: draw it to plan.png
    probe: str = ""             # find start and duration of seqlen, ltd or pool by short tries, and end
    sample: bool = False        # with --resume: print text from the newest checkpoint and end
    export: str = ""            # with --resume: write the newest checkpoint's weights and end: FILE.pt, or hf:FOLDER
    prompt: str = ""            # what the sample begins with
    max_new_tokens: int = 200   # length of a sample
    temperature: float = 0.8    # of a sample; 0 takes the likeliest token
    top_k: int = 200            # sample among this many likeliest tokens


POOL = ["voc:30%..100%:40%:sqrt"]
DRAWN = "data/shapes"           # the store of the drawn images
# a GPU trains this where the flags say nothing; a CPU trains the defaults above
GPU_SIZE = dict(n_layer=12, n_head=8, n_embd=512, global_batch=64, batch_size=64,
                train_tokens=40_000_000, learning_rate=1e-3)
# flags that belong to one call of the command, and those that a resumed run may change: neither touches plan or numbers
CALL = {"out", "resume", "overwrite", "stop_step", "trace", "plan", "plot", "probe", "sample", "export", "ds_config",
        "profile"}
LAYOUT = {"parallel", "tp", "pp", "pp_schedule", "offload"}         # where things lie: changes no number either
FREE = CALL | LAYOUT | {"data", "device", "batch_size", "compile", "recompute", "eval_interval", "save_interval",
                        "log_interval", "keep_ckpts", "ckpt_async", "ltd_kernel", "dist_timeout", "tensorboard",
                        "wandb", "wandb_group", "prompt", "max_new_tokens", "temperature", "top_k"}

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
                                        "save_interval", "keep_ckpts", "log_interval", "dist_timeout", "train_tokens",
                                        "tp", "pp", "expert_top_k", "moe_every", "image_size", "patch_size")},
    **{flag: (0, math.inf) for flag in ("seed", "eval_samples", "stop_step", "max_new_tokens", "temperature", "top_k",
                                        "n_expert", "moe_balance", "moe_z", "eps",
                                        "weight_decay", "grad_clip", "init_std", "learning_rate", "min_lr")},
    "dropout": (0, "1"), "beta1": (0, "1"), "beta2": (0, "1"), "mask_prob": (0.01, "1")}


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
    if cfg.trace and not Path(cfg.trace).absolute().parent.is_dir():
        raise ValueError(f"--trace={cfg.trace}: its folder does not exist; make it first")
    if cfg.profile and not re.fullmatch(r"\d+:[1-9]\d*", cfg.profile):
        raise ValueError(f"--profile={cfg.profile} must be START:STEPS, as 100:3")
    check_words(ltd_redraw=(cfg.ltd_redraw, ("layer", "once")), ltd_choice=(cfg.ltd_choice, ("random", "importance")))
    if cfg.n_expert and (cfg.n_expert < max(2, cfg.expert_top_k) or cfg.moe_every > cfg.n_layer):
        raise ValueError(f"--n_expert={cfg.n_expert} must be at least 2 and --expert_top_k={cfg.expert_top_k}, and "
                         f"--moe_every={cfg.moe_every} not above --n_layer={cfg.n_layer}")
    if cfg.compile and cfg.recompute == "selective":
        raise ValueError("--recompute=selective does not go with --compile, which chooses by itself what to compute "
                         "again; leave one of the two out, or take --recompute=block")
    check_words(parallel=(cfg.parallel, ENGINES), pp_schedule=(cfg.pp_schedule, SCHEDULES),
                norm=(cfg.norm, ("pre", "post")), optimizer=(cfg.optimizer, ("adamw", "sgd")),
                augment=(cfg.augment, ("crop,flip", "crop", "flip", "none")),
                recompute=(cfg.recompute, tuple(RECOMPUTE)))
    if cfg.offload and cfg.offload != "cpu" and not re.fullmatch("disk:.+", cfg.offload):
        raise ValueError(f"--offload={cfg.offload} is unknown; it takes cpu or disk:FOLDER")
    loss_scale(cfg)
    if cfg.export and (cfg.export == "hf:" or not Path(cfg.export.removeprefix("hf:")).absolute().parent.is_dir()):
        raise ValueError(f"--export={cfg.export}: the folder round it does not exist; make it first")
    if not (cfg.plan or cfg.sample or cfg.export):
        check_layout(cfg, world)
    other = cfg.arch != "gpt"
    for bad, what in ((other and cfg.sample, "--sample"), (other and cfg.pp > 1, f"--pp={cfg.pp}"),
                      (other and cfg.ltd_choice != "random", f"--ltd_choice={cfg.ltd_choice}"),
                      (cfg.arch == "vit" and cfg.seqlen != "off", f"--seqlen={cfg.seqlen}"),
                      (cfg.arch == "vit" and cfg.probe == "seqlen", "--probe=seqlen"),
                      (cfg.arch == "vit" and cfg.samples != "window", f"--samples={cfg.samples}"),
                      (cfg.arch == "bert" and cfg.seqlen.startswith("reshape"), f"--seqlen={cfg.seqlen}")):
        if bad:
            raise ValueError(f"{what} does not go with --arch={cfg.arch}; leave it out"
                             + ", or take --seqlen=truncate:..." * what.startswith("--seqlen=reshape"))
    labelled = tasks.is_labelled(cfg.data)
    for idle, flags, why in ((labelled, ("mask_prob", "nsp"), f"the labelled texts of --data={cfg.data}"),
                             (labelled and cfg.samples == "window", ("samples",), f"the labelled texts of {cfg.data}"),
                             (other, ("prompt", "max_new_tokens", "temperature", "top_k"), f"--arch={cfg.arch}"),
                             (cfg.arch != "bert", ("mask_prob", "nsp"), f"--arch={cfg.arch}"),
                             (cfg.arch != "vit", ("image_size", "patch_size", "augment"), f"--arch={cfg.arch}"),
                             (cfg.arch == "vit", ("block_size",), "--arch=vit: it follows from the patches"),
                             (cfg.optimizer == "sgd", ("beta2", "eps"), "--optimizer=sgd"),
                             (cfg.n_expert == 0, ("expert_top_k", "moe_every", "moe_balance", "moe_z"), "--n_expert=0"),
                             (cfg.pp == 1, ("pp_schedule",), "--pp=1"),
                             (cfg.dtype in ("float32", "bfloat16"), ("loss_scale",), f"--dtype={cfg.dtype}"),
                             (cfg.ltd == "off", [f for f in given if f.startswith("ltd_")], "--ltd=off"),
                             (cfg.ltd_choice == "importance", ("ltd_redraw",), "--ltd_choice=importance"),
                             (cfg.batch_ramp, ("ltd_redraw", "ltd_choice", "ltd_kernel"), "--batch_ramp"),
                             (cfg.plan or cfg.resume, ("probe",), "--plan or --resume"),
                             (cfg.probe != "", ("trace",), "--probe"),
                             (not cfg.wandb, ("wandb_group",), "no --wandb"),
                             (cfg.seqlen == "off", ("seqlen_multiple",), "--seqlen=off"),
                             (cfg.pool == ["off"], ("pool_order",), "--pool=off"),
                             (cfg.lr_decay == "constant", ("min_lr", "decay_tokens"), "--lr_decay=constant"),
                             (cfg.resume, ("overwrite",), "--resume"), (not cfg.plan, ("plot",), "no --plan")):
        for flag in set(flags) & given:
            if idle:
                raise ValueError(f"--{flag} has no effect with {why}; leave one of the two out")


def check_layout(cfg, world):
    """Refuse, by name, what a layout of ranks cannot do (parallel.py)."""
    whole, sharded = world % (cfg.tp * cfg.pp) == 0, cfg.parallel != "ddp" or cfg.tp * cfg.pp > 1
    dp = max(1, world // (cfg.tp * cfg.pp))
    stages = cfg.pp * (STAGES if cfg.pp_schedule == "interleaved" else 1)
    micro = cfg.global_batch // dp / cfg.batch_size         # batches a rank takes a step in
    what = " ".join(f"--{flag}={getattr(cfg, flag)}" for flag in ("parallel", "tp", "pp")
                    if getattr(cfg, flag) != getattr(Config, flag))
    for bad, why in (
            (sharded and "RANK" not in os.environ,
             f"needs torchrun: torchrun --nproc_per_node={max(2, cfg.tp * cfg.pp)} train.py ..."),
            (not whole, f"needs a multiple of {cfg.tp * cfg.pp} ranks, not {world}: "
                        f"torchrun --nproc_per_node={cfg.tp * cfg.pp}"),
            (cfg.tp > 1 and cfg.n_head % cfg.tp, f"needs --n_head ({cfg.n_head}) to be a multiple of --tp"),
            (cfg.tp > 1 and cfg.n_expert, "does not go with --n_expert: the experts are whole on each rank"),
            (cfg.tp * cfg.pp > 1 and cfg.dropout, "needs --dropout=0: the masks would depend on the layout"),
            (sharded and cfg.batch_ramp, "does not go with --batch_ramp: every rank needs as many samples"),
            (sharded and cfg.global_batch % dp, f"needs as many samples on each rank: --global_batch "
                                                f"({cfg.global_batch}) a multiple of {dp}"),
            (cfg.pp > 1 and cfg.ltd_choice == "importance", "does not go with --ltd_choice=importance: only the last "
                                                            "stage knows the losses"),
            (cfg.pp > 1 and stages > cfg.n_layer, f"needs a layer for each of its {stages} stages, not --n_layer="
                                                  f"{cfg.n_layer}"),
            (cfg.pp > 1 and (micro % 1 or micro < cfg.pp or cfg.pp_schedule == "interleaved" and micro % cfg.pp),
             f"takes a step in equal micro-batches, at least {cfg.pp} of them (interleaved: a multiple): take another "
             f"--batch_size than {cfg.batch_size} for the {cfg.global_batch // dp} samples of a rank"),
            (cfg.pp > 1 and cfg.samples == "document" and cfg.compile, "does not go with --compile over documents")):
        if bad:
            raise ValueError(f"{what} {why}")
    if cfg.global_batch < dp:
        raise ValueError(f"--global_batch={cfg.global_batch} leaves some of the {dp} ranks without a sample; "
                         f"take {dp} or more")
    on_host = cfg.device == "cpu" or not torch.cuda.is_available()
    if cfg.offload and cfg.parallel == "ddp" and not (on_host and cfg.offload != "cpu"):
        raise ValueError(f"--offload={cfg.offload} needs --parallel=zero1, zero2 or zero3"
                         + " (on a CPU, disk:FOLDER goes with ddp, too)")


def loss_scale(cfg):
    """--loss_scale=START:GROW as (first scale, steps until it doubles)."""
    start, _, grow = cfg.loss_scale.partition(":")
    if not (re.fullmatch(r"\d+(\.\d+)?", start) and float(start) >= 1 and re.fullmatch(r"\d+", grow)):
        raise ValueError(f"--loss_scale={cfg.loss_scale} must be START:GROW with START at least 1, as 65536:2000, or "
                         "1024:0 for a fixed scale")
    return float(start), int(grow)


def settle(cfg, given, device):
    """Fill in what the flags left open: the named model, the larger size for a GPU, the default pool, the data."""
    size = {}
    if cfg.init_from:
        import hf
        size = hf.read_config(cfg.init_from)
        del_block = {"block_size"} if size["arch"] == "vit" else set()
        wrong = [name for name in size.keys() & given if getattr(cfg, name) != size[name]
                 and not (name == "block_size" and cfg.block_size < size[name]) and name != "image_size"]
        wrong += [name for name in ("n_expert", "init_std") if name in given and name not in size]
        if wrong or cfg.model:
            raise ValueError(f"--{(wrong or ['model'])[0]} does not go with --init_from={cfg.init_from}, which has "
                             f"{size}; leave it out (a shorter --block_size may be given)")
        size = {name: value for name, value in size.items() if name not in {"vocab_size"} | del_block}
    elif cfg.model:
        if cfg.model not in SIZES:
            raise ValueError(f"--model={cfg.model} is unknown; it takes {', '.join(SIZES)}")
        size = dict(zip(("n_layer", "n_embd", "n_head", "block_size", "init_std"), SIZES[cfg.model]))
        size["arch"] = cfg.model.partition("-")[0] if cfg.model.partition("-")[0] in FAMILIES else "gpt"
        if cfg.model in IMAGES:
            size["image_size"], size["patch_size"] = IMAGES[cfg.model]
        if "arch" in given and cfg.arch != size["arch"]:
            raise ValueError(f"--model={cfg.model} is of --arch={size['arch']}, not {cfg.arch}; leave one of them out")
        if "n_layer" in given and cfg.n_layer != size["n_layer"]:
            raise ValueError(f"--model={cfg.model} has {size['n_layer']} layers, not {cfg.n_layer}; leave out --model, "
                             "or --n_layer (with --ds_config: total_layer_num)")
    elif device != "cpu" and cfg.arch == "gpt" and not given & {"n_layer", "n_head", "n_embd"}:
        size = GPU_SIZE
        print0(f"default size for a GPU: {GPU_SIZE}")
    for name in size.keys() - given:
        setattr(cfg, name, size[name])
    check_words(arch=(cfg.arch, tuple(FAMILIES)))
    if cfg.arch != "gpt" and "bias" not in given:
        cfg.bias = True
    if cfg.arch == "vit":
        if "block_size" not in given:       # what is given is refused by check()
            cfg.block_size = (cfg.image_size // cfg.patch_size) ** 2 + 1
        cfg.pool, cfg.data = cfg.pool or ["off"], cfg.data or DRAWN
        cfg.seqlen = cfg.seqlen if "seqlen" in given else "off"
    cfg.pool, cfg.data = cfg.pool or list(POOL), cfg.data or EMBEDDED
    if tasks.is_labelled(cfg.data):
        cfg.samples = cfg.samples if "samples" in given else "document"
        cfg.pool = cfg.pool if "pool" in given else ["off"]
        cfg.seqlen = cfg.seqlen if "seqlen" in given else "off"
    cfg.min_lr = cfg.min_lr if cfg.min_lr >= 0 else cfg.learning_rate / 10


def resumed(cfg, given, path, saved):
    """The Config of a resumed run: the saved one, with the flags in FREE as given now. Refuses any other change."""
    saved = Config(**saved)
    # they move the masks of dropout, and the means that the experts' auxiliary losses are
    free = FREE - ({"batch_size", "compile"} if saved.dropout or saved.n_expert else set())
    for name in given - free:
        if getattr(cfg, name) != getattr(saved, name):
            raise ValueError(f"--{name}={getattr(cfg, name)} differs from {getattr(saved, name)} in {path}; a resumed "
                             "run keeps its settings: leave the flag out, or start another run with another --out")
    if cfg.sample or cfg.export:        # one process reads what many wrote
        given, cfg = given | LAYOUT, dataclasses.replace(cfg, **{name: getattr(Config, name) for name in LAYOUT})
    return dataclasses.replace(saved, **{name: getattr(cfg, name) for name in given & free | CALL})


def plan_of(cfg, store):
    """The Plan of a Config. store: the training samples, or None where the data are elsewhere."""
    flags = {name: getattr(cfg, name) for name in inspect.signature(make_plan).parameters if hasattr(cfg, name)}
    return make_plan(**flags, store=store)


def task_of(cfg):
    """What the run learns from, and is judged by."""
    return tasks.make_task(**{name: getattr(cfg, name) for name in tasks.FLAGS})


def store_for_plan(cfg):
    """The training split for --plan, or None, said in a line, where it or its difficulties are not here: step counts of
    windows follow from the flags alone; the pool, and all about documents, does not."""
    folder = Path(cfg.data)
    store = task_of(cfg).store if folder.is_dir() else None
    names = [text.partition(":")[0] for text in cfg.pool if text != "off"]
    lacks = f"no folder {folder}" if store is None else ", ".join(
        f"no {store.columns}/{name}.json" for name in names if not (store.columns / f"{name}.json").is_file())
    if lacks and cfg.samples == "document":
        raise ValueError(f"--plan with --samples=document needs the data, and there is {lacks}")
    if lacks:
        print0(f"the pool is not known: {lacks}")
    return None if lacks else store


def ensure_embedded(cfg):
    """Make what is missing of the embedded corpus, its tokens or this block size's difficulties, or the drawn images,
    by the offline command: local rank 0 does, before there is a process group, the others wait for the last file."""
    meta = Path(cfg.data) / "meta.json"
    last = columns_folder(EMBEDDED, cfg.block_size, cfg.samples) / "voc.json" if cfg.data == EMBEDDED else meta
    if meta.is_file() and (last.is_file() or cfg.pool == ["off"]):
        return
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        what = [f"--data={EMBEDDED}"] if meta.is_file() else []
        command = ["data_analyze.py", *what, f"--block_size={cfg.block_size}", f"--samples={cfg.samples}"]
        if cfg.data == DRAWN:
            command = ["data_analyze.py", "--images=shapes", f"--out={DRAWN}"]
        what = "drawn images" if cfg.data == DRAWN else "embedded corpus"
        print0(f"making the {what}: python {' '.join(command)}")
        here = Path(__file__).resolve().parent
        # without torchrun's variables, or it would wait for the other ranks
        alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        p = subprocess.run([sys.executable, str(here / command[0]), *command[1:]], env=alone)
        if p.returncode and not last.is_file():
            raise ValueError(f"{cfg.data} could not be made; see the message above")
    deadline = time.time() + cfg.dist_timeout
    while not last.is_file():
        if time.time() > deadline:
            raise ValueError(f"{last} did not appear within {cfg.dist_timeout} s; make it with: python data_analyze.py")
        time.sleep(0.5)
