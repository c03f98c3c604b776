"""From text to a token store and its difficulty columns: the offline half of efficient data sampling.

    python data_analyze.py                                         the embedded corpus: Python's own standard library
    python data_analyze.py --text=my_folder --out=data/mine        your text (.txt, .jsonl, .jsonl.gz)
    python data_analyze.py --data=data/mine --block_size=1024      difficulty columns for another block size

One pass turns documents into tokens (parallel over documents, never inside one: the tokens of a text depend on what
stands beside it), a second one turns tokens into one number a sample. Paper: arXiv 2212.03597 section 3.1.
"""
import gzip
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import time
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data import Tokenizer, parse_flags, read_meta, run_command
from difficulty import METRICS, analyze, show

EMBEDDED = "data/stdlib"
PATTERN = (r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"""
           r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+""")
TRAIN_CHARS = 200_000_000   # a trained BPE reads this much of the corpus at most


@dataclass
class Config:
    text: list = field(default_factory=list)  # files/folders of .txt, .jsonl[.gz] (repeatable); none = embedded corpus
    out: str = ""               # folder to write; data/stdlib for the embedded corpus
    data: str = ""              # an existing store: compute difficulty columns only
    text_key: str = "text"      # field of a JSON line that holds the text
    tokenizer: str = "bpe"      # bpe (trained here), bytes, a tiktoken name (gpt2, o200k_base, ...) or a tokenizer.json
    vocab_size: int = 2048      # of a trained bpe
    val_fraction: float = 0.05  # share of the documents for validation: every 1/val_fraction-th
    errors: str = "strict"      # what to do with bytes that are no UTF-8: strict (refuse) or replace (count)
    skip_bad: int = 0           # malformed JSON lines to skip and count before refusing
    workers: int = 0            # threads that encode; 0 = one a core
    block_size: int = 256       # tokens a sample, for the difficulty columns
    metric: str = "voc"         # difficulty columns, comma-separated: voc, zlib, loss, FILE.py:FUNCTION; "" = none
    checkpoint: str = ""        # for --metric=loss: the reference model, out/RUN/ckpt_STEP.pt
    show: bool = False          # with --data: print and draw existing columns instead of computing them
    overwrite: bool = False     # replace an existing store


# -----------------------------------------------------------------------------
# documents


def text_files(paths):
    """Every file named, and every .txt, .jsonl and .jsonl.gz below every folder named, in sorted order."""
    files, kinds = [], (".txt", ".jsonl", ".jsonl.gz")
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(kinds))
            if not found:
                raise ValueError(f"--text={path} holds no .txt, .jsonl or .jsonl.gz file")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"--text={path} does not exist; give a file or a folder")
    return files


def decode(raw, errors, where, counts, start_of_file=False):
    """bytes -> str. A byte-order mark is dropped at the start of a file only; line ends stay as they are."""
    if start_of_file and raw.startswith(b"\xef\xbb\xbf"):
        raw, counts["byte-order marks dropped"] = raw[3:], counts["byte-order marks dropped"] + 1
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        if errors != "replace":
            raise ValueError(f"{where}: byte {e.start} ({raw[e.start]:#04x}) is no UTF-8; "
                             "convert the file, or give --errors=replace") from None
        counts["documents with bytes replaced"] += 1
        return raw.decode("utf-8", "replace")


def lines(file, disk):
    """The lines of an open file, unpacked if its name ends in .gz."""
    try:
        yield from gzip.open(disk) if file.name.endswith(".gz") else disk
    except (EOFError, OSError, zlib.error) as e:
        raise ValueError(f"{file} cannot be read to its end ({e}); fetch or pack it again") from None


def documents(files, cfg, counts, progress=lambda n: None):
    """Yield the text of every document: a .jsonl line, or a whole file of any other kind. A lone surrogate (legal in
    JSON, not in UTF-8) becomes U+FFFD."""
    for file in files:
        if not file.name.endswith((".jsonl", ".jsonl.gz")):
            raw = file.read_bytes()
            progress(len(raw))
            yield decode(raw, cfg.errors, str(file), counts, start_of_file=True)
            continue
        with open(file, "rb") as disk:
            before, at = 0, 0
            for number, line in enumerate(lines(file, disk), 1):
                at += len(line)
                now = disk.tell() if file.name.endswith(".gz") else at
                progress(now - before)
                before = now
                if not line.strip():
                    continue
                where = f"{file}, line {number}"
                try:
                    record = json.loads(decode(line, cfg.errors, where, counts, start_of_file=number == 1))
                    text = record[cfg.text_key] if isinstance(record, dict) else None
                except json.JSONDecodeError as e:
                    counts["malformed lines skipped"] += 1
                    if counts["malformed lines skipped"] > cfg.skip_bad:
                        raise ValueError(f"{where} is no JSON ({e.msg}); mend it, "
                                         "or skip up to N such lines with --skip_bad=N") from None
                    continue
                except KeyError:
                    raise ValueError(f"{where} has no field {cfg.text_key!r}, only {sorted(record)}; "
                                     "name it with --text_key=FIELD") from None
                if not isinstance(text, str):
                    raise ValueError(f"{where}: the field {cfg.text_key!r} must hold a text; "
                                     "name another one with --text_key=FIELD")
                try:
                    text.encode()
                except UnicodeEncodeError:
                    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                    counts["documents with lone surrogates replaced"] += 1
                yield text


def embedded_files():
    """The .py files of this interpreter's standard library, without tests and installed packages: text that every
    machine has. Another Python version is another corpus, so its fingerprint is printed with every result."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))


# -----------------------------------------------------------------------------
# tokens


def get_tokenizer(cfg, files):
    """The tokenizer that --tokenizer names, training it on the documents if need be."""
    if cfg.tokenizer == "bytes":
        return Tokenizer({"kind": "bytes"})
    if cfg.tokenizer.endswith(".json"):
        try:
            return Tokenizer(json.loads(Path(cfg.tokenizer).read_text()))
        except (OSError, KeyError, json.JSONDecodeError) as e:
            raise ValueError(f"--tokenizer={cfg.tokenizer} is no saved tokenizer ({type(e).__name__}: {e})") from None
    if cfg.tokenizer != "bpe":
        return Tokenizer({"kind": "tiktoken", "name": cfg.tokenizer})
    if cfg.vocab_size < 258:
        raise ValueError(f"--vocab_size={cfg.vocab_size}: a BPE needs at least 258 "
                         "(256 bytes, one merge, the end of text)")
    try:
        import rustbpe
    except ImportError:
        raise ValueError("--tokenizer=bpe needs the package rustbpe (pip install rustbpe); "
                         "--tokenizer=bytes needs nothing") from None

    def some():
        chars = 0
        for text in documents(files, cfg, Counter()):
            yield text
            chars += len(text)
            if chars > TRAIN_CHARS:
                return
    print(f"training a BPE of {cfg.vocab_size} tokens ...", flush=True)
    bpe = rustbpe.Tokenizer()
    bpe.train_from_iterator(some(), cfg.vocab_size - 1, pattern=PATTERN)    # the last id is the end of text
    ranks = [bytes(b).decode("latin-1") for b, _ in sorted(bpe.get_mergeable_ranks(), key=lambda r: r[1])]
    return Tokenizer({"kind": "bpe", "pattern": PATTERN, "ranks": ranks})


def encode_all(files, cfg, tokenizer, counts):
    """Yield each document's tokens, eot_id at its end, in order; `workers` threads encode at once (tiktoken releases
    the interpreter lock). At most 4 batches a worker of about 1 MB of text, or one document, are held in memory."""
    total, start, state = sum(f.stat().st_size for f in files) or 1, time.time(), {"done": 0, "told": 0.0}

    def progress(n):
        state["done"] += n
        if time.time() - state["told"] > 2 and time.time() - start > 2:
            state["told"] = time.time()
            rate = state["done"] / (time.time() - start)
            eta = (total - state["done"]) / rate
            print(f"tokenizing {state['done'] / total:4.0%} | {rate / 1e6:.1f} MB/s | eta {eta:.0f} s", flush=True)

    def batches():
        batch, size = [], 0
        for text in documents(files, cfg, counts, progress):
            if not text:
                counts["empty documents skipped"] += 1
                continue
            batch.append(text)
            size += len(text)
            if size > 1_000_000:
                yield batch
                batch, size = [], 0
        yield batch

    def encode(batch):
        return [np.append(tokenizer.encode(text), np.uint32(tokenizer.eot_id)) for text in batch]

    workers = cfg.workers or os.cpu_count()
    with ThreadPoolExecutor(workers) as pool:
        running = deque()
        for batch in batches():
            running.append(pool.submit(encode, batch))
            if len(running) >= 4 * workers:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()


def build(files, cfg, out, corpus):
    """Write the store `out`: into a folder beside it first, renamed when it is whole. Same bytes for any workers."""
    if out.exists() and not cfg.overwrite:
        raise ValueError(f"{out} exists; give another --out, or --overwrite to replace it")
    if out.exists() and not (out / "meta.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is no store (it holds no meta.json), so --overwrite will not delete it; "
                         "give another --out")
    if any(out.resolve() in f.resolve().parents for f in files):
        raise ValueError(f"--out={out} holds the text to read; give another --out")
    if not 0 <= cfg.val_fraction < 1:
        raise ValueError(f"--val_fraction={cfg.val_fraction:g} must be at least 0 and below 1")
    if cfg.errors not in ("strict", "replace"):
        raise ValueError(f"--errors={cfg.errors} is unknown; it takes strict or replace")
    tokenizer, counts = get_tokenizer(cfg, files), Counter()
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    tmp = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    tmp.mkdir(parents=True)
    try:
        digest = {split: hashlib.blake2b(digest_size=16) for split in ("train", "val")}
        tokens, n_docs, starts = Counter(), Counter(), []
        with open(tmp / "train.bin", "wb") as train, open(tmp / "val.bin", "wb") as val:
            for i, doc in enumerate(encode_all(files, cfg, tokenizer, counts)):
                # every 1/f-th document goes to validation: spread over the corpus, no generator, no second pass
                split = "val" if int((i + 1) * cfg.val_fraction + 1e-9) > int(i * cfg.val_fraction + 1e-9) else "train"
                if split == "train":
                    starts.append(tokens["train"])
                raw = doc.astype(dtype).tobytes()
                (val if split == "val" else train).write(raw)
                digest[split].update(raw)
                tokens[split] += len(doc)
                n_docs[split] += 1
        if not sum(tokens.values()):
            some = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
            raise ValueError(f"no tokens from {len(files)} files ({some}): all documents are empty")
        if cfg.val_fraction and not n_docs["val"]:
            # fewer than 1/f documents: the last ones that hold that share, or of a single one the end of it
            share = int(tokens["train"] * cfg.val_fraction)
            whole_documents = [s for s in starts[1:] if tokens["train"] - s >= share] or starts[1:]
            cut = whole_documents[-1] if whole_documents else tokens["train"] - share
            whole = np.memmap(tmp / "train.bin", dtype=dtype, mode="r")
            (tmp / "val.bin").write_bytes(whole[cut:].tobytes())
            os.truncate(tmp / "train.bin", cut * dtype().itemsize)
            tokens["val"], tokens["train"] = tokens["train"] - cut, cut
            held = sum(s >= cut for s in starts)
            what = f"{held} of them" if held else f"{cfg.val_fraction:.0%} of its tokens"
            print(f"only {len(starts)} document{'s' * (len(starts) > 1)}: the last {what} are the validation split")
            n_docs["val"], starts = max(held, 1), [s for s in starts if s < cut]
            n_docs["train"] = len(starts)
        spec = json.dumps(tokenizer.spec)
        sizes = json.dumps([tokens["train"], tokens["val"]])
        content = digest["train"].hexdigest() + digest["val"].hexdigest() + spec + sizes
        fingerprint = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
        np.save(tmp / "train.docs.npy", np.array(starts, np.int64))
        (tmp / "tokenizer.json").write_text(spec)
        meta = {"dtype": np.dtype(dtype).name, "tokenizer": cfg.tokenizer, "vocab_size": tokenizer.vocab_size,
                "eot_id": tokenizer.eot_id, "tokens": {s: tokens[s] for s in ("train", "val")},
                "documents": {s: n_docs[s] for s in ("train", "val")},
                "corpus": corpus, "fingerprint": fingerprint, "counts": dict(counts)}
        (tmp / "meta.json").write_text(json.dumps(meta, indent=1))
        if out.exists():
            shutil.rmtree(out)
        os.replace(tmp, out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    print(f"{out}: {tokens['train']:,} training and {tokens['val']:,} validation tokens from {n_docs['train']:,} and "
          f"{n_docs['val']:,} documents, vocabulary {tokenizer.vocab_size}, fingerprint {fingerprint}")
    for what, n in sorted(counts.items()):
        print(f"    {what}: {n:,}")


def main():
    cfg, given = parse_flags(Config, sys.argv[1:], "Make a token store and its difficulty columns.")
    metrics = [m for m in cfg.metric.split(",") if m]
    for m in metrics:
        if m not in METRICS and ".py:" not in m:
            raise ValueError(f"--metric={m} is unknown; it takes {', '.join(METRICS)} or FILE.py:FUNCTION")
    if ("loss" in metrics) != bool(cfg.checkpoint):
        raise ValueError("--metric=loss and --checkpoint=out/RUN/ckpt_STEP.pt go together: give both or neither")
    for flag, least in (("block_size", 1), ("workers", 0), ("skip_bad", 0)):
        if getattr(cfg, flag) < least:
            raise ValueError(f"--{flag}={getattr(cfg, flag)} must be at least {least}")
    if cfg.data:
        idle = sorted(given - {"data", "block_size", "metric", "checkpoint", "show"})
        if idle:
            raise ValueError(f"--data analyses an existing store, where --{idle[0]} has no effect; "
                             "a new store is made with --text and --out")
        read_meta(cfg.data)
    elif cfg.text:
        if not cfg.out:
            raise ValueError("--text needs a folder to write: --out=data/NAME")
        build(text_files(cfg.text), cfg, Path(cfg.out), "")
    else:
        cfg.errors = "replace" if "errors" not in given else cfg.errors
        build(embedded_files(), cfg, Path(cfg.out or EMBEDDED), f"standard library of Python {sys.version.split()[0]}")
    folder = cfg.data or cfg.out or EMBEDDED
    if metrics and not cfg.show:
        analyze(folder, cfg.block_size, metrics, cfg.checkpoint)
    if cfg.show:
        show(folder, cfg.block_size, metrics)


if __name__ == "__main__":
    run_command(main)
