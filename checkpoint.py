"""Checkpoints: ckpt_<step>.pt, one plain file, where a rank holds everything; else a folder ckpt_<step> of shards.

Either appears by rename, so that one which is there is whole, and either is read by any layout of ranks: names and
shapes in it are the whole model's. A file holds {"model", "optimizer", "step", "config", ...}, tensors and plain types
only, opens with torch.load's default and can run no code. A folder is of torch.distributed.checkpoint, every rank
writing its own part, with the plain types in run.json; its index is a pickle, which is read with the few names that it
needs and no other. `python train.py --resume --out=RUN --export=model.pt` makes one plain file of either.
"""
import json
import math
import os
import pickle
import shutil
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from data import write_atomic
from output import print0
from parallel import cut, local


def step_of(path):
    return int(path.stem[5:])


def checkpoints(folder):
    """The complete checkpoints in a run's folder, both kinds, by step."""
    return sorted((p for p in Path(folder).glob("ckpt_*") if p.suffix == ".pt" or p.is_dir() and not p.suffix),
                  key=step_of)


def newest(folder):
    """The newest checkpoint that opens, as (path, content), or None; content has no tensors where it is a folder. One
    that was cut short or is damaged is named, the latter set aside, and the one before it taken. ValueError where there
    are some and none opens: to begin anew would be a surprise. A disk that does not answer is no damage: OSError."""
    for path in sorted(Path(folder).glob("ckpt_*.tmp")):
        print0(f"{path} is incomplete, of a save that was cut short: passed over")
    paths = checkpoints(folder)
    for path in reversed(paths):
        try:
            return path, read(path)
        except Exception as e:      # torch.load raises whatever the damage makes of it
            if (isinstance(e, (MemoryError, OSError)) and not isinstance(e, FileNotFoundError)
                    or "allocate memory" in str(e) or "unable to mmap" in str(e)):
                raise
            print0(f"{path} does not open ({type(e).__name__}: {str(e)[:80]}): set aside as .damaged, "
                   "trying the one before it")
            if int(os.environ.get("RANK", 0)) == 0 and path.exists():
                path.rename(path.with_suffix(f".{time.time_ns()}.damaged"))
    if paths:
        raise ValueError(f"none of the {len(paths)} checkpoints in {folder} opens; --overwrite starts the run again")
    return None


def read(path):
    """The content of a checkpoint; of a folder all but its tensors, after a look at whether every shard is there."""
    path = Path(path)
    if not path.is_dir():           # mapped: ranks of a host share its pages, and read only what they take
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    check_shards(path)
    return json.loads((path / "run.json").read_text())


def check_shards(path):
    """Raise EOFError or FileNotFoundError unless every shard that the index names is there, as long as it says."""
    ends = {}
    for info in _metadata(path).storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        if (path / name).stat().st_size < end:
            raise EOFError(f"{name} is cut short")


def load(path, content, state):
    """Fill the live tensors of state {"model": {name: tensor}, ...} from a checkpoint, each with this rank's piece."""
    if Path(path).is_dir():
        from torch.distributed import checkpoint as dcp
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")             # one process is what is meant
            return dcp.load(state, storage_reader=_reader(path), no_dist=not dist.is_initialized())
    with torch.no_grad():
        for section, tensors in state.items():
            for name, t in tensors.items():
                local(t).copy_(cut(content[section][name], t))


def _metadata(path):
    """The index of a folder of shards. A pickle may call anything; this one only what an index is made of."""
    allowed = {"torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata TensorProperties StorageMeta "
               "_MEM_FORMAT_ENCODING ChunkStorageMetadata MetadataIndex", "torch.serialization": "_get_layout",
               "torch.distributed.checkpoint.filesystem": "_StorageInfo", "torch": "Size float32 float64",
               "pathlib": "PosixPath", "pathlib._local": "PosixPath"}

    class Index(pickle.Unpickler):
        def find_class(self, module, name):
            if name not in allowed.get(module, "").split():
                raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index of shards")
            return super().find_class(module, name)
    with open(Path(path) / ".metadata", "rb") as f:
        return Index(f).load()


def _reader(path):
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            index = _metadata(path)
            index.storage_meta.load_id = self.load_id
            return index
    return Reader(path)


class Saver:
    """Writes a run's checkpoints. shards: as folders, every rank its part; wait=False: beside the training, from a copy
    in the host's memory (--ckpt_async). All ranks call save() and finish()."""

    def __init__(self, folder, rank, shards, wait=True, timeout=600):
        self.folder, self.rank, self.shards, self.wait, self.pending = Path(folder), rank, shards, wait, None
        # the collectives of a save beside the training must not meet the training's own
        self.group = (dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
                      if dist.is_initialized() and not wait else None)

    def save(self, step, plain, state):
        """Write the checkpoint of a step: plain, a dict of plain types, and the live tensors. A full disk costs this
        checkpoint, never the run or the one before, and a line says so."""
        self.finish()
        path = self.folder / f"ckpt_{step:07d}"
        try:
            if not self.shards:
                if self.rank == 0:      # the tied head under its other name, too: load_state_dict() asks for both
                    model = dict(state["model"])
                    if "wte.weight" in model:
                        model.setdefault("head.weight", model["wte.weight"])
                    write_atomic(path.with_suffix(".pt"), lambda f: torch.save(plain | state | {"model": model}, f))
                return
            temporary = path.with_suffix(".tmp")
            from torch.distributed import checkpoint as dcp
            writer = dcp.FileSystemWriter(temporary)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")         # one process is what is meant
                if self.wait:
                    future = None
                    dcp.save(state, storage_writer=writer)
                else:
                    future = dcp.async_save(state, storage_writer=writer, process_group=self.group)
            self.pending = future, temporary, path, plain
            self.finish(wait=self.wait)
        except BaseException as e:
            self._failed(path, e)

    def finish(self, wait=True):
        """Bring the save that is under way to its end. wait=False: only if it is over already, for every step to ask: a
        checkpoint has its name when it is written, not when the next one is due."""
        if self.pending is None or not wait and not self.pending[0].done():
            return
        (future, temporary, path, plain), self.pending = self.pending, None
        try:
            if future is not None:
                future.result()
            if self.rank == 0:          # what rank 0 does alone it does behind the others' messages: it may fail
                check_shards(temporary)     # a rank that does not share the folder has written its own elsewhere
                write_atomic(temporary / "run.json", lambda f: f.write(json.dumps(plain).encode()))
                os.replace(temporary, path)
        except BaseException as e:
            self._failed(path, e)

    def _failed(self, path, e):
        """What the disk refuses is survived; all else, a lost rank above all, goes on up."""
        failures = {r: cause for r, (cause, _) in getattr(e, "failures", {self.rank: (e, None)}).items()}
        # torch.save tells of a short write by a RuntimeError of its container
        if not any(isinstance(c, (OSError, EOFError)) or "inline_container" in str(c) for c in failures.values()):
            raise e
        if self.rank == 0:
            shutil.rmtree(path.with_suffix(".tmp"), ignore_errors=True)
            last = [p.name for p in checkpoints(self.folder)][-1:] or ["none"]
            causes = [f"rank {r}: {cause}" for r, cause in failures.items()]
            print0(f"{path.name} could not be written ({'; '.join(causes)}); the newest checkpoint is {last[0]}; "
                   "the run goes on")

    def prune(self, keep, sound=math.inf):
        """Delete all but the newest `keep` checkpoints, and those of steps after `sound`, whose weights went bad.
        Returns what is left. Called once the newest one has given a finite gradient: a ruined one never pushes a good
        one out. Rank 0 deletes."""
        paths = checkpoints(self.folder)
        good = [p for p in paths if step_of(p) <= sound]
        for path in set(paths) - set(good[-keep:]) if self.rank == 0 else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return good[-keep:]


def export(path, content, state, target):
    """One plain file of a checkpoint's weights and settings: {"model", "config", "step", ...}. state: of a whole model,
    loaded already."""
    plain = {k: v for k, v in content.items() if k not in ("model", "optimizer", "score")}
    write_atomic(target, lambda f: torch.save(plain | state, f))
