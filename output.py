"""A run's folder: log.jsonl, ckpt_<step>.pt, loss.png, and Weights & Biases beside them for those who want it.

log.jsonl is always written: its first line is the configuration, every other one a step or an evaluation; after a
resume a step may stand there twice, and the later line holds. A checkpoint appears by rename, so that one which is
there is whole. It holds tensors and plain types only, opens with torch.load's default and can run no code.
"""
import contextlib
import json
import math
import os
import subprocess
from pathlib import Path

import torch

from data import write_atomic


def print0(*args):
    """print, on rank 0 alone."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(*args, flush=True)


def append_line(fd, record):
    """One JSON line in one write, so that ranks can share a file and a kill leaves no half line."""
    os.write(fd, (json.dumps(record) + "\n").encode())


def save_checkpoint(folder, content):
    """Write ckpt_<step>.pt, whole or not at all."""
    write_atomic(Path(folder) / f"ckpt_{content['step']:07d}.pt", lambda f: torch.save(content, f))


def prune_checkpoints(folder, keep, sound=math.inf):
    """Delete all but the newest `keep` checkpoints, and those of steps after `sound`, whose weights went bad. Returns
    what is left. Called once the newest one has given a finite gradient: a ruined one never pushes a good one out."""
    paths = sorted(Path(folder).glob("ckpt_*.pt"))
    good = [p for p in paths if int(p.stem[5:]) <= sound]
    for path in set(paths) - set(good[-keep:]):
        path.unlink()
    return good[-keep:]


def newest_checkpoint(folder):
    """The newest checkpoint that opens, as (path, content), or None. One that does not open (a damaged disk) is named,
    set aside and passed over."""
    for path in sorted(Path(folder).glob("ckpt_*.pt"), reverse=True):
        try:
            return path, torch.load(path, map_location="cpu", weights_only=True)
        except Exception as e:      # torch.load raises whatever the damage makes of it
            print0(f"{path} does not open ({type(e).__name__}: {str(e)[:80]}): set aside as .damaged, "
                   "trying the one before it")
            if int(os.environ.get("RANK", 0)) == 0:
                path.rename(path.with_suffix(".damaged"))
    return None


def start_wandb(folder, config, group=""):
    """A wandb run, or None: whatever goes wrong costs one line, never the training. The mode is chosen before the
    start, because wandb cannot fall back once it has begun."""
    try:
        import wandb
        key = os.environ.get("WANDB_API_KEY") or Path("~/.netrc").expanduser().is_file()
        mode = os.environ.get("WANDB_MODE") or ("online" if key else "offline")
        run = wandb.init(project="winnow", name=Path(folder).name, group=group or None, dir=folder, config=config,
                         mode=mode, settings=wandb.Settings(init_timeout=30))
        run.define_metric("*", step_metric="step")      # the step is data, not wandb's count: a resume repeats some
        print0(f"wandb: {mode}")
        return run
    except Exception as e:
        print0(f"wandb: off ({type(e).__name__}: {str(e)[:100]}); log.jsonl has everything")
        return None


def wandb_log(run, record):
    """Log a record, or finish with record=None; an error of wandb's costs one line and ends its part."""
    if run is None or getattr(run, "winnow_off", False):
        return
    try:
        run.finish() if record is None else run.log(record)
    except Exception as e:
        run.winnow_off = True
        print0(f"wandb: off ({type(e).__name__}: {str(e)[:100]}); log.jsonl has everything")


def git_hash():
    """Short hash of the code's commit, or None outside a checkout."""
    try:
        p = subprocess.run(["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"],
                           capture_output=True, text=True)
        return p.stdout.strip() or None
    except OSError:
        return None


# dense half-precision FLOP/s by a part of the card's name, from the makers' data sheets
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12,
              "3090": 71e12, "A10": 125e12, "V100": 125e12}


def device_name(device):
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(device)


def peak_flops(device):
    """FLOP/s of the card, or nan where it is unknown: then no utilisation is shown."""
    return next((flops for key, flops in PEAK_FLOPS.items() if key in device_name(device)), math.nan)


def read_log(folder):
    """log.jsonl as (first line, {step: training record}, {step: validation record}); later lines hold."""
    lines = []
    for line in open(Path(folder) / "log.jsonl"):
        with contextlib.suppress(json.JSONDecodeError):     # a line cut short by a full disk
            lines.append(json.loads(line))
    return (next(r for r in lines if "config" in r), {r["step"]: r for r in lines if "loss" in r},
            {r["step"]: r for r in lines if "val_loss" in r})


def plot_loss(folder):
    """loss.png from log.jsonl: training and validation loss over layer-tokens."""
    try:
        from matplotlib.figure import Figure  # not pyplot: half a second, and a state of its own
    except ImportError:
        return print0("loss.png: not drawn, matplotlib is missing")
    _, train, val = read_log(folder)
    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    for records, key, label in ((train, "loss", "training"), (val, "val_loss", "validation, full length")):
        ax.plot(*zip(*sorted((r["layer_tokens"], r[key]) for r in records.values())), label=label, linewidth=1)
    ax.set(xlabel="layer-tokens", ylabel="loss (nats a token)")
    ax.legend()
    write_atomic(Path(folder) / "loss.png", lambda f: figure.savefig(f, dpi=120, format="png"))
