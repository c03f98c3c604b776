"""Work cut into parts, over processes and machines: part K of N writes its own file, one step joins them.

Under torchrun the ranks are the parts. Under any other scheduler each task calls --stage=map --part=K/N, and one call
of --stage=reduce follows. A part is whole when its .json is there, which is written last and holds a key: a digest of
all that the part depends on. One with this key is not made again; one with another key is stale, and named.
"""
import contextlib
import hashlib
import json
import os
import re
import shlex
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from data import write_atomic


@dataclass
class Job:
    """Which share of the work is this process's: part `part` (from 0) of `parts`; alone = all of it, without files."""
    stage: str = ""
    part: int = 0
    parts: int = 1
    torchrun: bool = False
    command: str = ""       # what the user typed, without --stage and --part: to say how a part is made again

    @property
    def alone(self):
        return not self.stage and not self.torchrun

    @property
    def maps(self):
        return self.stage == "map" or self.torchrun

    @property
    def reduces(self):
        return self.stage != "map" and self.part == 0

    @property
    def leads(self):
        """Does what is done once before all parts; under a scheduler each one that comes and finds it undone."""
        return self.part == 0 or not self.torchrun

    def share(self, n):
        """The range of this part in n pieces of work."""
        return range(n * self.part // self.parts, n * (self.part + 1) // self.parts)

    def wait(self):
        """Under torchrun: until all ranks are here. A rank that dies ends the others; tokenizing may take days."""
        if self.torchrun:
            import torch.distributed as dist
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=timedelta(days=7))
            dist.barrier()


def get_job(stage, part, argv=()):
    """The Job that --stage, --part and torchrun's environment make. ValueError for what does not fit together."""
    command = shlex.join(["python", "data_analyze.py", *(a for a in argv if not a.startswith(("--stage", "--part")))])
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if stage not in ("", "map", "reduce"):
        raise ValueError(f"--stage={stage} is unknown; it takes map or reduce")
    if world > 1:
        if stage or part:
            raise ValueError("torchrun makes the ranks the parts: leave --stage and --part out")
        return Job("", rank, world, True, command)
    if (stage == "map") != bool(part):
        raise ValueError("--stage=map and --part=K/N go together, as in --stage=map --part=3/64")
    m = re.fullmatch(r"(\d+)/(\d+)", part) if part else re.fullmatch("(1)/(1)", "1/1")
    if not m or not 1 <= int(m[1]) <= int(m[2]):
        raise ValueError(f"--part={part} must be K/N with K from 1 to N, as in --part=3/64")
    return Job(stage, int(m[1]) - 1, int(m[2]), False, command)


def key_of(*what):
    """A digest of anything that JSON can hold."""
    return hashlib.blake2b(json.dumps(what).encode(), digest_size=8).hexdigest()


def part_file(folder, job):
    """The part's file without its ending; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{job.part + 1:05d}-of-{job.parts:05d}"


def is_done(file, key):
    """Whether the part is there, whole and made of the same. One that is stale is taken away before it is made anew."""
    note = file.with_suffix(".json")
    if not note.is_file():
        return False
    if json.loads(note.read_text())["key"] != key:
        note.unlink()
        return False
    print(f"{note} is there already", flush=True)
    return True


def finish(file, key, **info):
    """Declare the part whole."""
    write_atomic(file.with_suffix(".json"), lambda f: f.write(json.dumps({"key": key, **info}).encode()))


def remove(folder):
    """Take away the parts and what was left of unfinished ones; the folder too, unless it holds something else."""
    for pattern in ("*-of-*.json", "*-of-*.bin", "*-of-*.npy", "tokenizer.*.json", "*.tmp"):
        for file in folder.glob(pattern):
            file.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def collect(folder, key, job):
    """All parts, in order: [(file without its ending, what finish() was told)]. Raises ValueError naming those that are
    missing or stale. Were there several sets (of 8, of 64 parts), the most complete one; all hold the same."""
    sets = {}
    for note in sorted(Path(folder).glob("*-of-*.json")):
        k, n = map(int, re.fullmatch(r"(\d+)-of-(\d+)", note.stem).groups())
        sets.setdefault(n, {})[k] = json.loads(note.read_text())
    if not sets:
        raise ValueError(f"{folder} holds no part; make each with: {job.command} --stage=map --part=K/N")
    wrong = {n: [k for k in range(1, n + 1) if have.get(k, {}).get("key") != key] for n, have in sets.items()}
    n = min(wrong, key=lambda n: len(wrong[n]) / n)
    if wrong[n]:
        say = [f"part {k} is {'of other data or settings' if k in sets[n] else 'missing'}" for k in wrong[n][:5]]
        raise ValueError(f"{folder}, of {n} parts: {', '.join(say)}{', ...' * (len(wrong[n]) > 5)}; make each with: "
                         f"{job.command} --stage=map --part={wrong[n][0]}/{n}")
    return [(Path(folder) / f"{k:05d}-of-{n:05d}", sets[n][k]) for k in range(1, n + 1)]
