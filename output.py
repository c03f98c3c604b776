"""A run's folder: log.jsonl, loss.png, a profile; beside them Weights & Biases or TensorBoard if asked for.

log.jsonl is always written: its first line is the configuration, every other one a step or an evaluation; after a
resume a step may stand there twice, and the later line holds.
"""
import contextlib
import json
import math
import os
import resource
import subprocess
import time
from pathlib import Path

import torch

from data import write_atomic


def print0(*args):
    """print, on rank 0 alone."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(*args, flush=True)


torn = set()        # files whose last line a full disk cut short
said = set()        # and those of which that was said


def open_lines(path):
    """A file descriptor to append lines to; a half line that an earlier run left gets its end."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        torn.add(fd)
    return fd


def append_line(fd, record):
    """One JSON line in one write, so that ranks can share a file and a kill leaves no half line. A full disk costs
    lines, which is said once, and not the run."""
    line, why = ("\n" * (fd in torn) + json.dumps(record) + "\n").encode(), "cut short"
    try:
        written = os.write(fd, line)
    except OSError as e:
        written, why = 0, e
    if written < len(line) and fd not in said:
        print(f"a line of the log or trace could not be written ({why}); the run goes on", flush=True)
        said.add(fd)
    torn.discard(fd) if written == len(line) else torn.add(fd)


def start_wandb(folder, config, group):
    """A wandb run. The mode is chosen before the start, because wandb cannot fall back once it has begun."""
    import wandb
    key = os.environ.get("WANDB_API_KEY") or Path("~/.netrc").expanduser().is_file()
    mode = os.environ.get("WANDB_MODE") or ("online" if key else "offline")
    run = wandb.init(project="winnow", name=Path(folder).name, group=group or None, dir=folder, config=config,
                     mode=mode, settings=wandb.Settings(init_timeout=30))
    run.define_metric("*", step_metric="step")      # the step is data, not wandb's count: a resume repeats some
    print0(f"wandb: {mode}")
    return run


class TensorBoard:
    def __init__(self, folder, start):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(folder, purge_step=start)       # steps that a resume repeats
        print0(f"tensorboard: --logdir {folder}")

    def log(self, record):
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self.writer.add_scalar(name, value, record["step"])

    def finish(self):
        self.writer.close()


class Trackers:
    """Who else gets every record: Weights & Biases, TensorBoard. What goes wrong with one costs a line and that
    tracker, never the training."""

    def __init__(self, **starts):
        self.running = {}
        for name, start in starts.items():
            if start:
                self._try(name, lambda start=start, name=name: self.running.update({name: start()}))

    def _try(self, name, call):
        try:
            call()
        except Exception as e:
            print0(f"{name}: off ({type(e).__name__}: {str(e)[:100]}); log.jsonl has everything")
            self.running.pop(name, None)

    def log(self, record):
        for name, tracker in list(self.running.items()):
            self._try(name, lambda tracker=tracker: tracker.log(record))

    def finish(self):
        for name, tracker in list(self.running.items()):
            self._try(name, tracker.finish)


class Profile:
    """--profile=START:STEPS: torch.profiler over these steps of rank 0. Leaves trace.json, for Perfetto or Chrome's
    tracing page, and prints the ten dearest operations and the share of the time in which messages to other ranks were
    under way. Costs a few steps' time and much memory: two or three steps are plenty."""

    def __init__(self, text, folder, device):
        first, steps = map(int, text.split(":"))
        self.steps, self.folder, self.device, self.profiler = range(first, first + steps), folder, device, None
        self.began = False

    def at(self, step):
        """Called before every step."""
        from torch import profiler
        if step in self.steps and not self.began:
            self.began = True
            kinds = [profiler.ProfilerActivity.CPU] + [profiler.ProfilerActivity.CUDA] * (self.device != "cpu")
            self.profiler, self.start = profiler.profile(activities=kinds), time.perf_counter()
            self.profiler.start()
        if self.profiler is not None and step >= self.steps.stop:
            self.finish()

    def finish(self):
        if not self.began:
            print0(f"profile: the run had none of the steps {self.steps[0]} to {self.steps[-1]}")
        if self.profiler is None:
            return
        if self.device != "cpu":
            torch.cuda.synchronize()
        seconds, p, self.profiler = time.perf_counter() - self.start, self.profiler, None
        p.stop()
        p.export_chrome_trace(str(self.folder / "trace.json"))
        events, own = p.key_averages(), "self_cpu_time_total" if self.device == "cpu" else "self_device_time_total"
        sent = [e for e in events if e.key.startswith(("gloo:", "nccl:"))]
        busy = sum(max(e.cpu_time_total, e.device_time_total) for e in sent) / 1e6
        print0(f"profile: {events.table(sort_by=own, row_limit=10, max_name_column_width=40)}\n"
               f"profile: messages under way {busy / seconds:.0%} of {seconds:.2f} s (what overlaps counts, too) | "
               f"{self.folder}/trace.json")


def peak_memory(device):
    """Bytes at the peak so far: of the device's memory that torch had in use, or of a CPU process as a whole."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated(device)


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
    try:
        write_atomic(Path(folder) / "loss.png", lambda f: figure.savefig(f, dpi=120, format="png"))
    except OSError as e:
        print0(f"loss.png: not drawn ({e})")
