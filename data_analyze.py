"""From text to a token store and its difficulty columns: the offline half of efficient data sampling.

    python data_analyze.py                                         the embedded corpus: Python's own standard library
    python data_analyze.py --text=my_folder --out=data/mine        your text (.txt, .jsonl, .jsonl.gz or .zst, .parquet)
    python data_analyze.py --data=data/mine --block_size=1024      difficulty columns for another block size
    torchrun --nproc_per_node=8 data_analyze.py ...                the same by many processes, on a shared folder

One pass turns documents into tokens (parallel over documents, never inside one: the tokens of a text depend on what
stands beside it), a second one turns tokens into one number a sample. Paper: arXiv 2212.03597 section 3.1.
"""
import hashlib
import json
import os
import sys
import time
from array import array
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import glue
import images
import parts
from data import (
    EMBEDDED,
    STORE_FILES,
    digest_of,
    document_starts,
    documents_file,
    goes_to_val,
    new_folder,
    read_meta,
    refuse_out,
    write_atomic,
)
from difficulty import METRICS, analyze, show
from flags import parse_flags, run_command
from text import SKIPPED, SPLITS, STDIN, documents, embedded_files, text_files
from tokenizer import Tokenizer, read_tokenizer, read_vocab, wordpiece

PATTERN = (r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"""
           r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+""")
TRAIN_CHARS = 200_000_000   # a trained BPE reads this much of the corpus at most


@dataclass
class Config:
    text: list = field(default_factory=list)  # files or folders of text, - = standard input; none = embedded corpus
    out: str = ""               # folder to write; data/stdlib for the embedded corpus
    data: str = ""              # an existing store: compute difficulty columns only
    text_key: str = "text"      # field of a JSON line that holds the text
    images: str = ""            # instead of text: CIFAR's batches, folders of a class each, an .npz, or shapes (drawn)
    image_size: int = 0         # image files are scaled to it; 0 = 224
    task: str = ""              # labelled texts: one of GLUE's (cola, sst2, ..., with its folder), classify or regress
    pair_key: str = ""          # of classify and regress: field of a second text
    label_key: str = "label"    # of classify and regress: field of the label
    split: str = ""             # cut each text into documents: at its lines (line), or at blank lines (paragraph)
    tokenizer: str = "bpe"      # bpe, wordpiece (trained here), bytes, a tiktoken name, vocab.txt, or a tokenizer.json
    vocab_size: int = 2048      # of a trained bpe or wordpiece
    val_fraction: float = 0.05  # share of the documents for validation: every 1/val_fraction-th
    errors: str = "strict"      # what to do with bytes that are no UTF-8: strict (refuse) or replace (count)
    skip_bad: int = 0           # malformed JSON lines to skip and count before refusing
    workers: int = 0            # threads; 0 = one a core
    stage: str = ""             # under a scheduler: map (with --part), then reduce; torchrun needs neither
    part: str = ""              # K/N, as 3/64: which part to map
    block_size: int = 256       # tokens a sample, for the difficulty columns
    samples: str = "window"     # window (of the token stream) or document (one a sample, cut or padded)
    metric: str = "voc"         # columns, comma-separated: voc, seqlen, seqlen_voc, zlib, loss, FILE.py:FUNCTION
    checkpoint: str = ""        # for --metric=loss: the reference model, out/RUN/ckpt_STEP.pt
    show: bool = False          # with --data: print and draw existing columns instead of computing them
    overwrite: bool = False     # replace an existing store


# -----------------------------------------------------------------------------
# tokens


def get_tokenizer(cfg, files):
    """The tokenizer that --tokenizer names, training it on the documents if need be."""
    if cfg.tokenizer == "bytes":
        return Tokenizer({"kind": "bytes"})
    if cfg.tokenizer.endswith(".json"):
        return read_tokenizer(cfg.tokenizer)
    if cfg.tokenizer.endswith(".txt"):
        return Tokenizer(read_vocab(cfg.tokenizer))
    if cfg.tokenizer not in ("bpe", "wordpiece"):
        return Tokenizer({"kind": "tiktoken", "name": cfg.tokenizer})
    if cfg.vocab_size < 258:
        raise ValueError(f"--vocab_size={cfg.vocab_size}: a BPE needs at least 258 "
                         "(256 bytes, one merge, the end of text)")
    if set(map(str, files)) & set(STDIN):
        raise ValueError(f"--text=- can be read only once, and --tokenizer={cfg.tokenizer} is trained on the text "
                         "first; name another --tokenizer, or write the text to a file")

    def some():
        chars = 0
        for text in documents(files, cfg, Counter()):
            yield text
            chars += len(text)
            if chars > TRAIN_CHARS:
                return
    if cfg.tokenizer == "wordpiece":
        print(f"training a WordPiece of {cfg.vocab_size} tokens ...", flush=True)
        vocab = wordpiece([], True, some(), cfg.vocab_size).get_vocab()
        return Tokenizer({"kind": "wordpiece", "vocab": sorted(vocab, key=vocab.get), "lowercase": True})
    try:
        import rustbpe
    except ImportError:
        raise ValueError("--tokenizer=bpe needs the package rustbpe (pip install rustbpe); "
                         "--tokenizer=bytes needs nothing") from None
    print(f"training a BPE of {cfg.vocab_size} tokens ...", flush=True)
    bpe = rustbpe.Tokenizer()
    bpe.train_from_iterator(some(), cfg.vocab_size - 1, pattern=PATTERN)    # the last id is the end of text
    ranks = [bytes(b).decode("latin-1") for b, _ in sorted(bpe.get_mergeable_ranks(), key=lambda r: r[1])]
    return Tokenizer({"kind": "bpe", "pattern": PATTERN, "ranks": ranks})


def encode_all(files, cfg, tokenizer, counts):
    """Yield each document's tokens, eot_id at its end, in order; `workers` threads encode at once (tiktoken releases
    the interpreter lock). At most 4 batches a worker of about 1 MB of text, or one document, are held in memory."""
    total, start, state = sum(f.stat().st_size for f in files if f.exists()), time.time(), {"done": 0, "told": 0.0}

    def progress(n):
        state["done"] += n
        if time.time() - state["told"] > 2 and time.time() - start > 2:
            state["told"] = time.time()
            done, rate = state["done"], state["done"] / (time.time() - start)
            eta = f"{done / total:4.0%} | eta {(total - done) / rate:.0f} s" if total else f"{done / 1e6:.0f} MB"
            print(f"tokenizing {eta} | {rate / 1e6:.1f} MB/s", flush=True)

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


def check_out(files, cfg, out):
    """Refuse what cannot be built, before anything is read."""
    refuse_out(out, cfg.overwrite, STORE_FILES)
    if any({out.resolve(), out.resolve().with_name(f"{out.name}.parts")} & set(f.resolve().parents) for f in files):
        raise ValueError(f"--out={out} holds the text to read, or {out.name}.parts does; give another --out")
    if not 0 <= cfg.val_fraction < 1:
        raise ValueError(f"--val_fraction={cfg.val_fraction:g} must be at least 0 and below 1")
    if cfg.split and cfg.split not in SPLITS:
        raise ValueError(f"--split={cfg.split} is unknown; it takes {' or '.join(SPLITS)}")
    if cfg.errors not in ("strict", "replace"):
        raise ValueError(f"--errors={cfg.errors} is unknown; it takes strict or replace")


def build(encoded, tokenizer, counts, cfg, out, corpus):
    """Write the store `out` from the documents' tokens: into a folder beside it first, renamed when it is whole."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    with new_folder(out) as tmp:
        digest = {split: hashlib.blake2b(digest_size=16) for split in ("train", "val")}
        tokens, starts = Counter(), {"train": array("q"), "val": array("q")}
        with open(tmp / "train.bin", "wb") as train, open(tmp / "val.bin", "wb") as val:
            for i, doc in enumerate(encoded):
                split = "val" if goes_to_val(i, cfg.val_fraction) else "train"
                starts[split].append(tokens[split])
                raw = doc.astype(dtype).tobytes()
                (val if split == "val" else train).write(raw)
                digest[split].update(raw)
                tokens[split] += len(doc)
        if not sum(tokens.values()):
            some = ", ".join(map(str, cfg.text[:3])) + (", ..." if len(cfg.text) > 3 else "")
            raise ValueError(f"no tokens from {some}: all documents are empty")
        if cfg.val_fraction and not starts["val"]:
            # fewer than 1/f documents: the last ones that hold that share, or of a single one the end of it
            all_starts, share = list(starts["train"]), int(tokens["train"] * cfg.val_fraction)
            whole_documents = [s for s in all_starts[1:] if tokens["train"] - s >= share] or all_starts[1:]
            cut = whole_documents[-1] if whole_documents else tokens["train"] - share
            whole = np.memmap(tmp / "train.bin", dtype=dtype, mode="r")
            (tmp / "val.bin").write_bytes(whole[cut:].tobytes())
            os.truncate(tmp / "train.bin", cut * dtype().itemsize)
            tokens["val"], tokens["train"] = tokens["train"] - cut, cut
            starts = {"train": [s for s in all_starts if s < cut], "val": [s - cut for s in all_starts if s >= cut]}
            held = len(starts["val"])
            starts["val"] = starts["val"] or [0]
            what = f"{held} of them" if held else f"{cfg.val_fraction:.0%} of its tokens"
            print(f"only {len(all_starts)} document{'s' * (len(all_starts) > 1)}: the last {what} are the validation "
                  "split")
        spec = json.dumps(tokenizer.spec)
        sizes = json.dumps([tokens["train"], tokens["val"]])
        content = digest["train"].hexdigest() + digest["val"].hexdigest() + spec + sizes
        fingerprint = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
        for split in starts:
            np.save(tmp / f"{split}.docs.npy", np.array(starts[split], np.int64))
        (tmp / "tokenizer.json").write_text(spec)
        meta = {"dtype": np.dtype(dtype).name, "tokenizer": cfg.tokenizer, "vocab_size": tokenizer.vocab_size,
                "eot_id": tokenizer.eot_id, "special": tokenizer.special, "tokens": {s: tokens[s] for s in starts},
                "documents": {s: len(starts[s]) for s in starts},
                "corpus": corpus, "fingerprint": fingerprint, "counts": dict(counts)}
        (tmp / "meta.json").write_text(json.dumps(meta, indent=1))
    print(f"{out}: {tokens['train']:,} training and {tokens['val']:,} validation tokens from {len(starts['train']):,} "
          f"and {len(starts['val']):,} documents, vocabulary {tokenizer.vocab_size}, fingerprint {fingerprint}")
    for what, n in sorted(counts.items()):
        print(f"    {what}: {n:,}", flush=True)


# -----------------------------------------------------------------------------
# the same by many processes: a part is a run of files, about equally many bytes each


def share_of(files, job):
    """The files of this part. Files are not cut: more parts than files leave some without work."""
    ends = np.cumsum([f.stat().st_size for f in files], dtype=np.float64)
    middle = (ends - [f.stat().st_size / 2 for f in files]) / max(ends[-1], 1)
    first, last = np.searchsorted(middle, [job.part / job.parts, (job.part + 1) / job.parts])
    return files[first:last if job.part < job.parts - 1 else None]


def map_text(file, key, files, cfg, tokenizer):
    """Write one part: its documents' tokens back to back, how many each has, and what was counted on the way."""
    counts, lengths = Counter(), array("q")

    def write(f):
        for doc in encode_all(files, cfg, tokenizer, counts):
            f.write(doc.tobytes())                      # uint32
            lengths.append(len(doc))
    write_atomic(file.with_suffix(".bin"), write)
    write_atomic(file.with_suffix(".npy"), lambda f: np.save(f, np.array(lengths, np.int64)))
    parts.finish(file, key, counts=counts)
    print(f"{file}: {len(lengths):,} documents, {sum(lengths):,} tokens", flush=True)


def read_parts(found):
    """The tokens of every document of all parts, in order, as encode_all would yield them."""
    for file, _ in found:
        lengths = np.load(file.with_suffix(".npy"))
        if len(lengths):
            tokens = np.memmap(file.with_suffix(".bin"), np.uint32, "r")
            for start, n in zip((lengths.cumsum() - lengths).tolist(), lengths.tolist()):
                yield tokens[start:start + n]


def make_store(files, cfg, out, corpus, job):
    """The store `out`, or this job's part of the work. The same bytes for any number of threads, parts and ranks."""
    check_out(files, cfg, out)
    if job.alone:
        tokenizer, counts = get_tokenizer(cfg, files), Counter()
        return build(encode_all(files, cfg, tokenizer, counts), tokenizer, counts, cfg, out, corpus)
    if set(map(str, files)) & set(STDIN):
        raise ValueError("--text=- is one stream and has no parts; write it to files first")
    folder = out.with_name(f"{out.name}.parts")
    key = parts.key_of([[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files], cfg.tokenizer,
                       digest_of(cfg.tokenizer), cfg.vocab_size, cfg.text_key, cfg.errors, cfg.split)
    # one tokenizer for all parts; trained on the same text it is the same, so it does not matter who is first
    spec = folder / f"tokenizer.{key}.json"
    folder.mkdir(parents=True, exist_ok=True)
    if job.leads and not spec.is_file():
        trained = json.dumps(get_tokenizer(cfg, files).spec).encode()
        write_atomic(spec, lambda f: f.write(trained))
    job.wait()
    tokenizer = Tokenizer(json.loads(spec.read_text()))
    if job.maps:
        file = parts.part_file(folder, job)
        if not parts.is_done(file, key):
            map_text(file, key, share_of(files, job), cfg, tokenizer)
    job.wait()
    if job.reduces:
        found = parts.collect(folder, key, job)
        counts = sum((Counter(info["counts"]) for _, info in found), Counter())
        if counts[SKIPPED] > cfg.skip_bad:
            raise ValueError(f"{counts[SKIPPED]} malformed lines were skipped in all parts together, {cfg.skip_bad} "
                             "are allowed: mend them, or give --skip_bad=N to --stage=reduce")
        build(read_parts(found), tokenizer, counts, cfg, out, corpus)
        parts.remove(folder)
    job.wait()


# -----------------------------------------------------------------------------
# the command


def find_documents(folder, job):
    """Make what --samples=document needs of a store from elsewhere: where its documents begin."""
    meta, split_parts = read_meta(folder)
    for split, files in split_parts.items():
        file = documents_file(folder, meta, split)
        if job.leads and files and not file.is_file():
            starts = document_starts(files, meta["eot_id"])
            write_atomic(file, lambda f: np.save(f, starts))
            print(f"{file}: {len(starts):,} documents", flush=True)
    job.wait()


def make_labelled(cfg, given):
    """Stores of images (images.py) and of labelled texts (glue.py): made by one process, at once."""
    if cfg.images and (cfg.text or cfg.task):
        raise ValueError("--images stands alone: leave --text and --task out")
    if cfg.task and (cfg.task not in glue.TASKS or not cfg.text):
        raise ValueError(f"--task={cfg.task} must be one of {', '.join(glue.TASKS)}, with its texts: --text=...")
    if not cfg.out:
        raise ValueError("--images and --task need a folder to write: --out=data/NAME")
    if cfg.stage or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--images and --task are read by one process: leave torchrun and --stage out")
    own = {"images", "image_size", "val_fraction", "workers", "overwrite", "out", "metric", "checkpoint"}
    if cfg.task:
        own = {"task", "text", "tokenizer", "workers", "overwrite", "out", "metric", "block_size"} | (
            {"text_key", "pair_key", "label_key", "val_fraction"} if cfg.task in ("classify", "regress") else set())
    if given - own:
        raise ValueError(f"--{sorted(given - own)[0]} has no effect with --{'images' if cfg.images else 'task'}="
                         f"{cfg.images or cfg.task}; leave it out")
    if cfg.images:
        return images.build(cfg.images, cfg.out, cfg.image_size, cfg.val_fraction, cfg.overwrite, cfg.workers)
    for file in cfg.text if cfg.task in ("classify", "regress") else ():
        if not file.endswith((".tsv", ".jsonl")) or not Path(file).is_file():
            raise ValueError(f"--text={file} must be a .tsv or .jsonl file")
    cfg.samples = "document"
    if cfg.tokenizer in ("bpe", "wordpiece"):
        raise ValueError(f"--tokenizer={cfg.tokenizer} is trained on text, not on labelled ones: give the one of the "
                         "model, --tokenizer=bert_folder/vocab.txt or data/mine/tokenizer.json")
    glue.build(cfg.task, cfg.text, cfg.out, get_tokenizer(cfg, []), cfg.text_key, cfg.pair_key, cfg.label_key,
               cfg.val_fraction, cfg.overwrite, cfg.workers)


def main():
    cfg, given = parse_flags(Config, sys.argv[1:], "Make a token store and its difficulty columns.")
    if (cfg.images or cfg.task or images.is_images(cfg.data)) and "metric" not in given:
        cfg.metric = ""
    metrics = [m for m in cfg.metric.split(",") if m]
    for m in metrics:
        if (cfg.images or images.is_images(cfg.data)) and m != "loss" and ".py:" not in m:
            raise ValueError(f"--metric={m} is of texts; images have loss, and FILE.py:FUNCTION")
        if m not in METRICS and ".py:" not in m:
            raise ValueError(f"--metric={m} is unknown; it takes {', '.join(METRICS)} or FILE.py:FUNCTION")
    names = [m.rpartition(":")[2] for m in metrics]
    if len(set(names)) < len(names):
        raise ValueError(f"--metric={cfg.metric} would write two columns of one name; rename a function")
    for flag in ("text", "data", "out"):
        if flag in given and not all(getattr(cfg, flag) or [""]):
            raise ValueError(f"--{flag} is empty; give a file or a folder")
    if cfg.show and (not cfg.data or cfg.stage):
        raise ValueError("--show prints the columns of an existing store: --show --data=FOLDER, without --stage")
    if "vocab_size" in given and cfg.tokenizer not in ("bpe", "wordpiece"):
        raise ValueError(f"--vocab_size has no effect with --tokenizer={cfg.tokenizer}; leave one of the two out")
    if ("loss" in metrics and not cfg.show) != bool(cfg.checkpoint):
        raise ValueError("--metric=loss and --checkpoint=out/RUN/ckpt_STEP.pt go together: give both or neither")
    for flag, least in (("block_size", 1), ("workers", 0), ("skip_bad", 0), ("image_size", 0)):
        if getattr(cfg, flag) < least:
            raise ValueError(f"--{flag}={getattr(cfg, flag)} must be at least {least}")
    job, folder = parts.get_job(cfg.stage, cfg.part, sys.argv[1:]), cfg.data or cfg.out or EMBEDDED
    if cfg.data:
        idle = sorted(given - {"data", "block_size", "samples", "metric", "checkpoint", "show", "workers", "stage",
                               "part"})
        if idle:
            raise ValueError(f"--data analyses an existing store, where --{idle[0]} has no effect; "
                             "a new store is made with --text and --out")
        if not images.is_images(cfg.data):
            read_meta(cfg.data)
    elif cfg.images or cfg.task:
        make_labelled(cfg, given)
    elif cfg.text:
        if not cfg.out:
            raise ValueError("--text needs a folder to write: --out=data/NAME")
        make_store(text_files(cfg.text), cfg, Path(cfg.out), "", job)
    else:
        cfg.errors = "replace" if "errors" not in given else cfg.errors
        make_store(embedded_files(), cfg, Path(folder), f"standard library of Python {sys.version.split()[0]}", job)
    if not cfg.data and job.stage:      # the parts of a text that is being read are no parts of its columns
        if job.stage == "map":
            return
        job = parts.Job()
    if cfg.samples == "document" and not images.is_images(folder):
        find_documents(folder, job)
    if metrics and not cfg.show:
        analyze(folder, cfg.block_size, metrics, cfg.checkpoint, cfg.samples, cfg.workers, job)
    if cfg.show and job.reduces:
        show(folder, cfg.block_size, metrics, cfg.samples)


if __name__ == "__main__":
    run_command(main)
