"""Token stores and rows: from sample ids to the (B, T+1) tokens of a batch, prepared ahead by one thread.

A store is a folder: meta.json, train.bin and val.bin (raw uint16 or uint32, as nanoGPT writes them), read through a
memory map, so that its size is limited by the disk alone; the pages it touches are file-backed (RssFile in
/proc/self/status) and the kernel takes them back when it needs them. Difficulty columns lie in T<block_size>/.
Made by:  python data_analyze.py --text=my_folder --out=data/mine
"""
import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import re
import secrets
import shlex
import shutil
import threading
from pathlib import Path

import numpy as np


def write_atomic(path, write):
    """Call write(file) on a temporary name beside `path`, sync it to disk, rename it into place. On any error the
    temporary file goes and what stood under the name before stays."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")  # hosts may share a folder
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(out):
    """A folder beside `out`, to be filled, which takes the place of `out` when the block ends; on any error it goes,
    and what stood there before stays."""
    tmp = out.with_name(f"{out.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    tmp.mkdir(parents=True)
    try:
        yield tmp
        if out.exists():
            shutil.rmtree(out)
        os.replace(tmp, out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def refuse_out(out, overwrite, ours, sources=()):
    """Refuse a folder `out` that a store may not be written to: it is there and not to be replaced, holds something
    that is no file of a store (ours: a pattern of their names), lies below a file, or holds what is to be read."""
    out = Path(out)
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists; give another --out, or --overwrite to replace it")
    inside = [p for p in (out.iterdir() if out.is_dir() else ()) if not re.fullmatch(ours, p.name)]
    inside += [p for p in out.glob("T*/*") if not p.name.endswith((".npy", ".json", ".png", ".tmp", ".parts"))]
    if out.exists() and (not out.is_dir() or out.is_symlink() or inside):
        raise ValueError(f"--overwrite will not delete {inside[0] if inside else out}: it is no part of a store; "
                         "give another --out")
    if any(p.is_file() for p in out.absolute().parents):
        raise ValueError(f"--out={out} lies below a file; give another --out")
    if any(out.resolve() in (s.resolve(), *s.resolve().parents) for s in map(Path, sources)):
        raise ValueError(f"--out={out} holds what is to be read; give another --out")


def read_labels(folder, split, n, n_labels):
    """The labels of a split: (n,) int64 classes below n_labels, or float64 where that is 1. ValueError names the
    file."""
    file = Path(folder) / f"{split}.labels.npy"
    try:
        labels = np.load(file)
        if labels.shape != (n,):
            raise ValueError(f"{labels.shape} labels for {n}")
        if n_labels > 1 and n and not 0 <= labels.min() <= labels.max() < n_labels:
            raise ValueError(f"labels from {labels.min()} to {labels.max()} of {n_labels} classes")
    except (OSError, ValueError, EOFError) as e:
        raise ValueError(f"{file} is damaged or missing ({e}); make the data again") from None
    return labels


EMBEDDED = "data/stdlib"        # the store of the embedded corpus


def columns_folder(folder, block_size, samples):
    """Where a store's difficulty columns for these samples lie."""
    return Path(folder) / (f"T{block_size}" + "-documents" * (samples == "document"))


def goes_to_val(i, fraction):
    """Whether sample i (a number or an array) is for validation: every 1/fraction-th is, spread over the set, without a
    generator or a second pass."""
    return np.floor((i + 1) * fraction + 1e-9) > np.floor(i * fraction + 1e-9)


STORE_FILES = r"meta\.json|(train|val)\.(bin|(docs|labels)\.npy)|tokenizer\.json|T\d+(-documents)?"


def digest_of(file):
    """A digest of a file's content; empty where there is none."""
    return hashlib.blake2b(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else ""


def read_json(path, fields):
    """A JSON object that has `fields`. Raises ValueError naming the file and what it lacks."""
    try:
        content = json.loads(Path(path).read_text())
        missing = [f for f in fields if f not in content]
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as e:
        raise ValueError(f"{path} is damaged ({e}); make the data again") from None
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; make the data again")
    return content


def read_meta(folder):
    """What a store holds, checked against its files: (meta, {split: [Part]}). Raises ValueError naming the file.

    Our own stores say so in meta.json. Without one, the folder's *.bin files are read in place by their own headers,
    those with "val" in their names as validation, all others as training, in the order of their names.
    """
    folder = Path(folder)
    if (folder / "meta.json").is_file():
        meta = read_json(folder / "meta.json", ("tokens", "dtype", "vocab_size", "eot_id", "fingerprint"))
        parts = {s: [Part(folder / f"{s}.bin", meta["dtype"], 0, tokens)] for s, tokens in meta["tokens"].items()}
    else:
        parts = {"train": [], "val": []}
        for file in sorted(folder.glob("*.bin")):
            parts["val" if re.search("(?<![a-z])val", file.name) else "train"].append(foreign_part(file))
        if not parts["train"]:
            raise ValueError(f"{folder} holds neither meta.json nor .bin files for training; make the data with: "
                             f"python data_analyze.py --text=FILE_OR_FOLDER --out={folder}")
        kinds = sorted({np.dtype(p.dtype).name for split in parts.values() for p in split})
        if len(kinds) > 1:
            raise ValueError(f"{folder} mixes tokens of {' and '.join(kinds)}; keep one corpus a folder")
        # 16 bits: GPT-2's vocabulary, as the tools that write these files use it; 32 bits: Llama 3's (llm.c)
        vocab_size, eot_id = (50257, 50256) if kinds == ["uint16"] else (128256, 128001)
        digest = hashlib.blake2b(digest_size=6)
        for file in (p.file for split in parts.values() for p in split):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            for part in filter(Path.is_file, (file, file.with_suffix(".idx"))):
                with open(part, "rb") as f:     # the two ends: reading all of a large corpus would take minutes
                    digest.update(f.read(1 << 20))
                    f.seek(-min(1 << 20, part.stat().st_size), os.SEEK_END)
                    digest.update(f.read())
        meta = {"dtype": kinds[0], "vocab_size": vocab_size, "eot_id": eot_id, "fingerprint": digest.hexdigest(),
                "tokens": {split: sum(p.tokens for p in files) for split, files in parts.items()}}
    for part in (p for split in parts.values() for p in split):
        least = part.offset + part.tokens * np.dtype(part.dtype).itemsize
        size = part.file.stat().st_size if part.file.is_file() else -1
        # only a file with a header may hold something behind its tokens
        if size < least or part.tokens < 0 or (size > least and part.offset == 0):
            has = "no file" if size < 0 else f"{size} bytes"
            if least or size > 0:
                raise ValueError(f"{part.file} has {has}, {least} are promised; make the data again")
    return meta, parts


@dataclasses.dataclass
class Part:
    """The tokens of one file: `tokens` numbers of `dtype` from byte `offset` on."""
    file: Path
    dtype: str
    offset: int
    tokens: int


LLMC = {20240520: "uint16", 20240801: "uint32"}       # llm.c's magic numbers: 256 int32 of header, tokens behind it
MEGATRON = {1: "uint8", 4: "int32", 8: "uint16"}      # Megatron's codes for the kinds of numbers that tokens come in


def megatron_lengths(index):
    """Lengths of a Megatron pair's sequences, back to back in the .bin: (n,) int32, a view of the .idx."""
    n = int(np.fromfile(index, "<u8", 1, offset=18)[0])
    return np.memmap(index, np.int32, "r", offset=34, shape=(n,))


def foreign_part(file):
    """A .bin file of another project: a shard of llm.c or modded-nanogpt (known by its magic number), the .bin of a
    Megatron pair (by the .idx beside it), else nanoGPT's: bare uint16."""
    size, index = file.stat().st_size, file.with_suffix(".idx")
    if index.is_file():
        with open(index, "rb") as f:
            raw = f.read(34)
        if raw[:9] != b"MMIDIDX\0\0" or len(raw) < 34:
            raise ValueError(f"{index} is no Megatron index (it does not begin with MMIDIDX)")
        if raw[17] not in MEGATRON:
            raise ValueError(f"{index}: its numbers are of kind {raw[17]}; tokens must be uint8, uint16 or int32")
        if index.stat().st_size < 34 + 4 * int.from_bytes(raw[18:26], "little"):
            raise ValueError(f"{index} is cut short; fetch the pair again")
        return Part(file, MEGATRON[raw[17]], 0, int(megatron_lengths(index).sum(dtype=np.int64)))
    header = np.fromfile(file, np.int32, 3)
    if len(header) == 3 and header[0] in LLMC:
        return Part(file, LLMC[int(header[0])], 1024, int(header[2]))
    return Part(file, "uint16", 0, size // 2)


def document_starts(parts, eot_id):
    """Where documents begin, counted in tokens over the `parts` of a split: int64. A document ends with eot_id and with
    its file; in a Megatron pair, where the index says. For stores made elsewhere; one pass over the tokens."""
    starts, base = [], 0
    for p in (p for p in parts if p.tokens):
        if p.file.with_suffix(".idx").is_file():
            inner = megatron_lengths(p.file.with_suffix(".idx")).cumsum(dtype=np.int64)
        else:
            tokens, chunk = np.memmap(p.file, p.dtype, "r", p.offset, (p.tokens,)), 1 << 22
            inner = np.concatenate([i + 1 + np.flatnonzero(tokens[i:i + chunk] == eot_id)
                                    for i in range(0, p.tokens, chunk)])
        starts.append(base + np.append(0, inner[inner < p.tokens]))
        base += p.tokens
    return np.concatenate(starts or [np.empty(0, np.int64)])


def documents_file(folder, meta, split):
    """train.docs.npy of a store of ours; one made for files from elsewhere bears their fingerprint."""
    own = (Path(folder) / "meta.json").is_file()
    return Path(folder) / (f"{split}.docs.npy" if own else f"{split}.{meta['fingerprint']}.docs.npy")


BUILT_IN = ("voc", "seqlen", "seqlen_voc", "zlib", "loss")      # difficulty.py's metrics, by name


class Store:
    """The samples of one split, read through memory maps; nothing is copied.

    samples="window": sample i = tokens[i*T : i*T + T + 1]: T inputs and the last one's label. Samples do not overlap;
    the last label is the next sample's first input. What is left at the end (under T + 1) of each file is not used.
    samples="document": one document a sample, its first T + 1 tokens, or padded to that. `lengths` (N,) int32 says how
    many of its T inputs are no padding: those with a label in the same document. One of a single token is left out.
    """

    def __init__(self, folder, split, block_size, samples="window"):
        self.folder, self.split, self.block_size, self.samples = Path(folder), split, block_size, samples
        if block_size < 1:
            raise ValueError(f"--block_size={block_size} must be at least 1")
        if samples not in ("window", "document"):
            raise ValueError(f"--samples={samples} is unknown; it takes window or document")
        self.meta, parts = read_meta(folder)
        parts = [p for p in parts.get(split, []) if p.tokens > (block_size if samples == "window" else 0)]
        if not parts:
            raise ValueError(f"{self.folder}/{split}.bin has {self.meta['tokens'].get(split, 0)} tokens; one sample of "
                             f"--block_size={block_size} needs {block_size + 1}: give more text or a smaller "
                             "--block_size")
        self.tokens = [np.memmap(p.file, p.dtype, "r", p.offset, (p.tokens,)) for p in parts]
        self.columns = columns_folder(folder, block_size, samples)
        if samples == "window":
            view = np.lib.stride_tricks.sliding_window_view
            self._windows = [view(t, block_size + 1)[::block_size] for t in self.tokens]    # (n, T+1) views, no copy
            self._ends = np.cumsum([len(w) for w in self._windows])
            self.n_samples, self.lengths, self.kept = int(self._ends[-1]), None, None
            return
        self._ends = np.cumsum([len(t) for t in self.tokens])
        file = documents_file(folder, self.meta, split)
        if not file.is_file():
            raise ValueError(f"{file} is missing: it says where documents begin; make it with: "
                             f"python data_analyze.py --data={folder} --samples=document --block_size={block_size}")
        starts = np.load(file, mmap_mode="r")
        lengths = np.minimum(np.diff(starts, append=self._ends[-1]) - 1, block_size).astype(np.int32)
        some = lengths > 0
        self.kept = None if some.all() else np.flatnonzero(some)        # which documents are samples, if not all
        self.n_samples = int(some.sum())
        self._starts, self.lengths = (starts, lengths) if some.all() else (starts[some], lengths[some])
        if not self.n_samples:
            raise ValueError(f"{self.folder}, split {split}, holds no document of two tokens; take --samples=window")

    def rows(self, ids):
        """(B,) sample ids -> (B, T+1) int64 tokens, -1 for padding. ValueError for a token outside the vocabulary."""
        ids = np.asarray(ids)
        rows = np.full((len(ids), self.block_size + 1), -1, np.int64)
        if self.lengths is None:
            file = np.searchsorted(self._ends, ids, side="right")
            for i in np.unique(file):
                mine = file == i
                rows[mine] = self._windows[i][ids[mine] - (self._ends[i] - len(self._windows[i]))]
        else:
            starts = self._starts[ids]
            for row, start, n, i in zip(rows, starts, self.lengths[ids], np.searchsorted(self._ends, starts, "right")):
                at = start - (self._ends[i] - len(self.tokens[i]))
                row[:n + 1] = self.tokens[i][at:at + n + 1]
        real = rows if self.lengths is None else rows[np.arange(self.block_size + 1) <= self.lengths[ids, None]]
        if real.size and not 0 <= real.min() <= real.max() < self.meta["vocab_size"]:
            wrong = real.min() if real.min() < 0 else real.max()
            raise ValueError(f"{self.folder}, split {self.split}, holds token {wrong}; "
                             f"its vocab_size is {self.meta['vocab_size']}")
        return rows

    def inputs(self, first, last):
        """Samples first..last-1 as (k, T) inputs without labels, and where they are no padding: (k, T) bool, or None
        for windows, which have none. Of windows a view of the map, but for those on both sides of a file's end."""
        if self.lengths is not None:
            rows = self.rows(np.arange(first, last))[:, :-1]                            # (k, T+1) -> (k, T)
            mask = np.arange(self.block_size) < self.lengths[first:last, None]
            return np.where(mask, rows, 0), mask
        found = []
        for tokens, windows, end in zip(self.tokens, self._windows, self._ends):
            a, b = (min(max(i - (end - len(windows)), 0), len(windows)) for i in (first, last))
            if a < b:
                found.append(tokens[a * self.block_size:b * self.block_size].reshape(-1, self.block_size))
        return found[0] if len(found) == 1 else np.concatenate(found), None

    def analysis(self, metric, name):
        """The command that makes a column."""
        return (f"python data_analyze.py --data={shlex.quote(str(self.folder))} --block_size={self.block_size} "
                f"--metric={name}" + " --samples=document" * (self.lengths is not None or metric.startswith("seqlen")))

    def column(self, metric, ranked=False):
        """One difficulty a sample, (N,), or its curriculum.ranks(), (N,) int32, written by data_analyze.py. Refuses one
        of other data by its fingerprint."""
        base = self.columns / metric.rpartition(":")[2]                                 # my.py:f is kept as f
        file, note = (base.with_name(base.name + end) for end in (".rank.npy" if ranked else ".npy", ".json"))
        name = metric if metric in BUILT_IN or ".py:" in metric else f"FILE.py:{metric}"
        name += " --checkpoint=out/RUN/ckpt_STEP.pt" * (metric == "loss")
        again = self.analysis(metric, name)
        if not file.is_file() or not note.is_file():
            have = ", ".join(sorted(p.stem for p in self.columns.glob("*.json"))) or "none"
            raise ValueError(f"{file} is missing (columns there: {have}); make it with: {again}")
        info = read_json(note, ("fingerprint",))
        if info["fingerprint"] != self.meta["fingerprint"]:
            raise ValueError(f"{file} belongs to other data ({info['fingerprint']}, "
                             f"not {self.meta['fingerprint']}); make it again: {again}")
        code = Path(metric.rpartition(":")[0])
        if ".py:" in metric and code.is_file() and info.get("code") != digest_of(code):
            raise ValueError(f"{file} was made by another {metric}; make it again: {again}")
        values = np.load(file, mmap_mode="r")
        if len(values) != self.n_samples:
            raise ValueError(f"{file} has {len(values)} values for {self.n_samples} samples; make it again: {again}")
        return values


def prefetch(make, start, stop, ahead=2):
    """Yield make(i) for i in start..stop-1, computed up to `ahead` items early by one thread. An error in make() is
    raised here. Nothing is counted by the thread, so what was made but not consumed is no part of any state."""
    todo, done = queue.Queue(), threading.Event()
    slots = threading.Semaphore(ahead)

    def work():
        for i in range(start, stop):
            slots.acquire()
            if done.is_set():
                return
            try:
                todo.put((make(i), None))
            except BaseException as e:      # hand it to the consumer, who is in a place to report it
                todo.put((None, e))
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        for _ in range(start, stop):
            item, error = todo.get()
            if error is not None:
                raise error
            slots.release()
            yield item
    finally:
        done.set()
        slots.release()
        thread.join()
