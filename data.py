"""Token stores and rows: from sample ids to the (B, T+1) tokens of a batch, prepared ahead by one thread.

A store is a folder: meta.json, train.bin and val.bin (raw uint16 or uint32, as nanoGPT writes them), read through a
memory map, so that its size is limited by the disk alone; the pages it touches are file-backed (RssFile in
/proc/self/status) and the kernel takes them back when it needs them. Difficulty columns lie in T<block_size>/.
Made by:  python data_analyze.py --text=my_folder --out=data/mine
"""
import argparse
import dataclasses
import difflib
import hashlib
import inspect
import json
import os
import queue
import re
import sys
import threading
import traceback
from pathlib import Path

import numpy as np


def write_atomic(path, write):
    """Call write(file) on a temporary name beside `path`, sync it to disk, rename it into place. On any error the
    temporary file goes and what stood under the name before stays."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
            parts["val" if "val" in file.name else "train"].append(foreign_part(file))
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
            with open(file, "rb") as f:         # the two ends: reading all of a large corpus would take minutes
                digest.update(f.read(1 << 20))
                f.seek(-min(1 << 20, file.stat().st_size), os.SEEK_END)
                digest.update(f.read())
        meta = {"dtype": kinds[0], "vocab_size": vocab_size, "eot_id": eot_id, "fingerprint": digest.hexdigest(),
                "tokens": {split: sum(p.tokens for p in files) for split, files in parts.items()}}
    for part in (p for split in parts.values() for p in split):
        least = part.offset + part.tokens * np.dtype(part.dtype).itemsize
        size = part.file.stat().st_size if part.file.is_file() else -1
        # a file of ours, or of nanoGPT's, holds tokens and nothing else
        if size < least or (size > least and part.offset == 0 and not part.file.with_suffix(".idx").is_file()):
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


def foreign_part(file):
    """A .bin file of another project: a shard of llm.c or modded-nanogpt (known by its magic number), the .bin of a
    Megatron pair (by the .idx beside it), else nanoGPT's: bare uint16."""
    size, index = file.stat().st_size, file.with_suffix(".idx")
    if index.is_file():
        raw = index.read_bytes()[:34]
        if raw[:9] != b"MMIDIDX\0\0" or len(raw) < 34:
            raise ValueError(f"{index} is no Megatron index (it does not begin with MMIDIDX)")
        code, n = raw[17], int.from_bytes(raw[18:26], "little")
        if code not in MEGATRON:
            raise ValueError(f"{index}: its numbers are of kind {code}; tokens must be uint8, uint16 or int32")
        lengths = np.memmap(index, np.int32, "r", offset=34, shape=(n,))    # of the sequences, back to back in the .bin
        return Part(file, MEGATRON[code], 0, int(lengths.sum(dtype=np.int64)))
    header = np.fromfile(file, np.int32, 3)
    if len(header) == 3 and header[0] in LLMC:
        return Part(file, LLMC[int(header[0])], 1024, int(header[2]))
    return Part(file, "uint16", 0, size // 2)


class Store:
    """The samples of one split. Sample i = tokens[i*T : i*T + T + 1]: T inputs and the last one's label. Samples do
    not overlap; the last label is the next sample's first input. What is left at the end (under T + 1) of each file
    is not used. Files are read through memory maps; nothing is copied."""

    def __init__(self, folder, split, block_size):
        self.folder, self.split, self.block_size = Path(folder), split, block_size
        if block_size < 1:
            raise ValueError(f"--block_size={block_size} must be at least 1")
        self.meta, parts = read_meta(folder)
        parts = [p for p in parts.get(split, []) if p.tokens > block_size]
        if not parts:
            raise ValueError(f"{self.folder}/{split}.bin has {self.meta['tokens'].get(split, 0)} tokens; one sample of "
                             f"--block_size={block_size} needs {block_size + 1}: give more text or a smaller "
                             "--block_size")
        self.tokens = [np.memmap(p.file, p.dtype, "r", p.offset, (p.tokens,)) for p in parts]
        view = np.lib.stride_tricks.sliding_window_view
        self._windows = [view(t, block_size + 1)[::block_size] for t in self.tokens]        # (n, T+1) views, no copy
        self._ends = np.cumsum([len(w) for w in self._windows])
        self.n_samples = int(self._ends[-1])

    def rows(self, ids):
        """(B,) sample ids -> (B, T+1) int64 tokens. Raises ValueError where a token lies outside the vocabulary."""
        ids = np.asarray(ids)
        rows, file = np.empty((len(ids), self.block_size + 1), np.int64), np.searchsorted(self._ends, ids, side="right")
        for i in np.unique(file):
            mine = file == i
            rows[mine] = self._windows[i][ids[mine] - (self._ends[i] - len(self._windows[i]))]
        if rows.size and not 0 <= rows.min() <= rows.max() < self.meta["vocab_size"]:
            raise ValueError(f"{self.folder}, split {self.split}, holds token {rows.max()}; "
                             f"its vocab_size is {self.meta['vocab_size']}")
        return rows

    def inputs(self, per):
        """All samples in order as (k, T) arrays of inputs, k <= per, without labels: views of the maps."""
        for tokens, windows in zip(self.tokens, self._windows):
            flat = tokens[:len(windows) * self.block_size].reshape(-1, self.block_size)
            for i in range(0, len(flat), per):
                yield flat[i:i + per]

    def column(self, metric):
        """One difficulty a sample, (N,), written by data_analyze.py. Refuses one of other data by its fingerprint."""
        base = self.folder / f"T{self.block_size}" / metric.rpartition(":")[2]      # my.py:f is kept as f
        again = f"python data_analyze.py --data={self.folder} --block_size={self.block_size} --metric={metric}"
        if not base.with_suffix(".npy").is_file() or not base.with_suffix(".json").is_file():
            have = ", ".join(sorted(p.stem for p in base.parent.glob("*.npy"))) or "none"
            raise ValueError(f"{base}.npy is missing (columns there: {have}); make it with: {again}")
        info = read_json(base.with_suffix(".json"), ("fingerprint",))
        if info["fingerprint"] != self.meta["fingerprint"]:
            raise ValueError(f"{base}.npy belongs to other data ({info['fingerprint']}, "
                             f"not {self.meta['fingerprint']}); make it again: {again}")
        values = np.load(base.with_suffix(".npy"), mmap_mode="r")
        if len(values) != self.n_samples:
            raise ValueError(f"{base}.npy has {len(values)} values for {self.n_samples} samples; "
                             f"make it again: {again}")
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


# -----------------------------------------------------------------------------
# tokenizers: `bytes`, a trained BPE, or any tiktoken encoding; all saved as JSON

LONGEST_RUN = 65_536    # more white space than this in one run overflows the stack of tiktoken's regular expressions


def tiktoken_encoding(name, limit_s=20):
    """tiktoken.get_encoding, refused within limit_s seconds where its vocabulary is neither cached nor fetchable."""
    import tiktoken
    result = []

    def load():
        try:
            result.append(tiktoken.get_encoding(name))
        except Exception as e:
            result.append(e)
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(limit_s)
    if result and not isinstance(result[0], Exception):
        return result[0]
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"--tokenizer={name} is unknown; it takes bpe, bytes, a tokenizer.json, "
                         f"or one of {', '.join(tiktoken.list_encoding_names())}")
    why = type(result[0]).__name__ if result else f"no answer in {limit_s} s"
    raise ValueError(f"--tokenizer={name}: its vocabulary file is not cached and cannot be fetched ({why}); "
                     "put it into a folder under the name that tiktoken gives it (the SHA-1 of its address) "
                     "and set TIKTOKEN_CACHE_DIR, or use --tokenizer=bpe")


class Tokenizer:
    """spec: {"kind": "bytes"} | {"kind": "tiktoken", "name"} | {"kind": "bpe", "pattern", "ranks": [latin-1 strings]}.
    eot_id stands at the end of every document. The spelling of a special token inside a text is ordinary text."""

    def __init__(self, spec):
        self.spec, self.encoding = spec, None
        if spec["kind"] == "bytes":
            self.vocab_size, self.eot_id = 257, 256
            return
        if spec["kind"] == "tiktoken":
            self.encoding = tiktoken_encoding(spec["name"])
        else:
            import tiktoken
            ranks = {s.encode("latin-1"): i for i, s in enumerate(spec["ranks"])}
            self.encoding = tiktoken.Encoding("winnow-bpe", pat_str=spec["pattern"], mergeable_ranks=ranks,
                                              special_tokens={"<|endoftext|>": len(ranks)})
        self.vocab_size, self.eot_id = self.encoding.n_vocab, self.encoding.eot_token

    def encode(self, text):
        """str -> (n,) uint32 array, without eot_id. A run of white space over LONGEST_RUN is encoded in pieces."""
        if self.encoding is None:
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        pieces, at = [], 0
        if len(text) > LONGEST_RUN:
            for run in re.finditer(rf"\s{{{LONGEST_RUN},}}", text):
                pieces += [text[at:run.start()]]
                pieces += [text[i:min(i + LONGEST_RUN, run.end())] for i in range(run.start(), run.end(), LONGEST_RUN)]
                at = run.end()
        pieces = [p for p in (*pieces, text[at:]) if p] or [""]
        return np.concatenate([self.encoding.encode_to_numpy(p, disallowed_special=()) for p in pieces])

    def decode(self, ids):
        """Token ids -> str; bytes that are no UTF-8 and ids without a token become U+FFFD, eot_id <|endoftext|>."""
        def as_bytes(i):
            if self.encoding is None:
                return bytes([i]) if i < 256 else b"<|endoftext|>"
            try:
                return self.encoding.decode_single_token_bytes(i)
            except KeyError:            # large vocabularies have holes
                return "\ufffd".encode()
        return b"".join(as_bytes(int(i)) for i in ids).decode(errors="replace")


def load_tokenizer(folder):
    """The tokenizer of a store, or None where it was made elsewhere and only token ids are known."""
    file = Path(folder) / "tokenizer.json"
    return Tokenizer(json.loads(file.read_text())) if file.is_file() else None


# -----------------------------------------------------------------------------
# the command line: one flat dataclass whose trailing comments are its help


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message}; --help lists the flags")


def _int(text):
    value = float(text)
    if not value.is_integer():      # false for inf and nan, too
        raise ValueError
    return int(text) if text.lstrip("-").isdigit() else int(value)


def _bool(text):
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]


_int.__name__, _bool.__name__ = "int", "bool"       # argparse shows these names


def parse_flags(cls, argv, about):
    """Read --flag=value into dataclass `cls`. Returns (config, the set of flags given). Types are those of the fields:
    int takes 1e6, bool takes true/false or nothing, lists repeat. Raises ValueError with the nearest flag's name."""
    help_of = dict(re.findall(r"^    (\w+):[^#\n]*#\s*(.*)$", inspect.getsource(cls), re.M))
    parser = _Parser(description=about, allow_abbrev=False)
    names = [f.name for f in dataclasses.fields(cls)]
    for before, word in zip(["", *argv], argv):
        if before.startswith("--") and "=" not in before and not word.startswith("--"):
            continue                    # "--flag value": the value
        name = word.lstrip("-").partition("=")[0]
        if name not in names and name not in ("help", "h"):
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean --{near[0]}?" if near else "--help lists the flags"
            raise ValueError(f"{word} is no flag of this command; {hint}")
        if not word.startswith("--") and word != "-h":
            raise ValueError(f"{word}: flags begin with two dashes: --{word.lstrip('-')}")
    for f in dataclasses.fields(cls):
        kind = type(f.default) if f.default is not dataclasses.MISSING else list
        extra = {bool: {"nargs": "?", "const": True, "metavar": "BOOL"}, list: {"action": "append"}}.get(kind, {})
        help_text = help_of[f.name] + ("" if kind is list else f" (default: {f.default})")
        parser.add_argument(f"--{f.name}", type={int: _int, bool: _bool, float: float}.get(kind, str),
                            default=argparse.SUPPRESS, help=help_text.replace("%", "%%"), **extra)
    try:
        given = vars(parser.parse_args(argv))
    except KeyError as e:
        raise ValueError(f"{e} is neither true nor false") from None
    return cls(**given), set(given)


def run_command(main):
    """Call main(); a ValueError of ours is the user's mistake: one line, exit code 2. One raised anywhere else is a
    fault of the program and keeps its traceback."""
    try:
        main()
    except ValueError as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        if Path(frame.filename).resolve().parent != Path(__file__).resolve().parent:
            raise
        rank = os.environ.get("RANK")
        print(f"{'' if rank is None else f'[rank {rank}] '}error: {e}", file=sys.stderr, flush=True)
        sys.exit(2)
