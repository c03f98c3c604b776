r"""Labelled texts: GLUE's tasks and your own, as a store that fine-tunes a BERT (tasks.py).

    python data_analyze.py --task=rte --text=glue_data/RTE --tokenizer=bert_folder/vocab.txt --out=data/rte
    python data_analyze.py --task=classify --text=train.jsonl --text=dev.jsonl --label_key=topic --out=data/topics ...
    python data_analyze.py --task=regress --text=pairs.tsv --text_key=left --pair_key=right --label_key=score ...
    python train.py --data=data/rte --init_from=bert_folder --out=out/rte --block_size=128 --ltd=off --global_batch=32 \
        --learning_rate=3e-5 --dropout=0.1 --eval_samples=0

An example is a document of the store, A [SEP] or A [SEP] B [SEP], beside it {train,val}.labels.npy, one number each.
TSV files have a header; JSON lines have the fields. GLUE: arXiv 1804.07461.
"""
import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data import STORE_FILES, goes_to_val, new_folder, refuse_out
from text import mend_surrogates

# name: (validation file, fields of A and B, field of the label, metrics); a number is a column of a file without header
TASKS = {
    "cola": ("dev.tsv", (3,), 1, ("matthews",)),
    "sst2": ("dev.tsv", ("sentence",), "label", ("accuracy",)),
    "mrpc": ("dev.tsv", ("#1 String", "#2 String"), "Quality", ("accuracy", "f1")),
    "stsb": ("dev.tsv", ("sentence1", "sentence2"), "score", ("pearson", "spearman")),
    "qqp": ("dev.tsv", ("question1", "question2"), "is_duplicate", ("accuracy", "f1")),
    "mnli": ("dev_matched.tsv", ("sentence1", "sentence2"), "gold_label", ("accuracy",)),
    "mnli-mm": ("dev_mismatched.tsv", ("sentence1", "sentence2"), "gold_label", ("accuracy",)),
    "qnli": ("dev.tsv", ("question", "sentence"), "label", ("accuracy",)),
    "rte": ("dev.tsv", ("sentence1", "sentence2"), "label", ("accuracy",)),
    "classify": (None, (), "", ("accuracy",)),
    "regress": (None, (), "", ("pearson", "spearman")),
}
NUMBERS = ("stsb", "regress")       # tasks whose label is a number, not a class


def examples(file, fields, label, skip=False):
    """[(A, label) or (A, B, label)] of one file, as strings, and how many lines were skipped. A line without its fields
    is refused by file and number, or with skip passed by: GLUE's own files have some."""
    found, skipped, header = [], 0, None
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{file} cannot be read ({e})") from None
    # no quoting: GLUE's texts have single quotation marks; no splitlines(): and odd separators
    lines = [(i, line.removesuffix("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    packed = str(file).endswith(".jsonl")
    if not packed and not isinstance(label, int):
        header = lines.pop(0)[1].split("\t") if lines else []
        missing = [f for f in (*fields, label) if f not in header]
        if missing:
            raise ValueError(f"{file} has no column {missing[0]!r}, only {header}"
                             + ("" if skip else "; name them with --text_key, --pair_key and --label_key"))
    for i, line in lines:
        try:
            record = json.loads(line) if packed else line.split("\t")
            record = dict(zip(header, record)) if header else record
            row = [record[f] for f in (*fields, label)]
            if not all(isinstance(text, str) for text in row[:-1]) or not isinstance(row[-1], (str, int, float)):
                raise TypeError("a text must be a string, a label a string or a number")
        except (KeyError, IndexError, TypeError, ValueError) as e:
            if skip:
                skipped += 1
                continue
            raise ValueError(f"{file}, line {i}: {type(e).__name__} {e}; it needs {', '.join(map(str, fields))} and "
                             f"{label}") from None
        found.append((*map(mend_surrogates, row[:-1]), str(row[-1])))
    return found, skipped


def read(task, paths, text_key, pair_key, label_key, val_fraction):
    """{split: examples} of a task. paths: GLUE's folder, or your file or files (training, validation)."""
    dev, fields, label, _ = TASKS[task]
    if dev is not None:
        if len(paths) != 1 or not Path(paths[0]).is_dir():
            raise ValueError(f"--task={task} needs its folder: --text=FOLDER with train.tsv and {dev}")
        found = {}
        for split, name in (("train", "train.tsv"), ("val", dev)):
            found[split], skipped = examples(Path(paths[0]) / name, fields, label, skip=True)
            if skipped:
                print(f"{paths[0]}/{name}: {skipped:,} lines without all their fields skipped", flush=True)
        return found
    fields = (text_key, *[pair_key] * bool(pair_key))
    if not 1 <= len(paths) <= 2:
        raise ValueError(f"--task={task} needs one file, or two, --text=TRAIN --text=VALIDATION (.tsv or .jsonl)")
    sets = [examples(path, fields, label_key)[0] for path in paths]
    if len(sets) == 1:
        sets = [[e for i, e in enumerate(sets[0]) if goes_to_val(i, val_fraction) == val] for val in (False, True)]
    return dict(zip(("train", "val"), sets))


def numbers(task, sets):
    """({split: labels as numbers}, names of the classes)."""
    if task in NUMBERS:
        try:
            found = {split: np.array([float(e[-1]) for e in rows], np.float64) for split, rows in sets.items()}
        except ValueError as e:
            raise ValueError(f"--task={task}: a label is no number ({e})") from None
        if not all(np.isfinite(v).all() for v in found.values()):
            raise ValueError(f"--task={task}: a label is not finite")
        return found, []
    names = sorted({e[-1] for e in sets["train"]},
                   key=lambda s: (0, int(s), s) if re.fullmatch(r"-?\d+", s) else (1, 0, s))
    alien = {e[-1] for e in sets["val"]} - set(names)
    if alien or len(names) < 2:
        raise ValueError(f"--task={task}: all labels are {names}; two classes are needed" if not alien else
                         f"--task={task}: the validation has the classes {sorted(alien)}, the training has not")
    place = {name: i for i, name in enumerate(names)}
    return {split: np.array([place[e[-1]] for e in rows], np.int64) for split, rows in sets.items()}, names


def build(task, paths, out, tokenizer, text_key="text", pair_key="", label_key="label", val_fraction=0.1,
          overwrite=False, workers=0):
    """Write the store `out`: into a folder beside it first, renamed when it is whole."""
    out = Path(out)
    refuse_out(out, overwrite, STORE_FILES, paths)
    sets = read(task, paths, text_key, pair_key, label_key, val_fraction)
    for split, rows in sets.items():
        sets[split] = [e for e in rows if any(text.strip() for text in e[:-1])]
        if len(sets[split]) < len(rows):
            print(f"{len(rows) - len(sets[split]):,} examples without a text skipped ({split})", flush=True)
    if not all(sets.values()):
        raise ValueError(f"--task={task}: {min(sets, key=lambda s: len(sets[s]))} has no example")
    labels, classes = numbers(task, sets)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32

    def encode(example):
        return np.concatenate([np.append(tokenizer.encode(text), tokenizer.eot_id) for text in example[:-1]])
    with new_folder(out) as tmp:
        digest, tokens = hashlib.blake2b(digest_size=6), {}
        for split, rows in sets.items():
            with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
                encoded = list(pool.map(encode, rows))
            lengths = np.array(list(map(len, encoded)))
            raw = np.concatenate(encoded).astype(dtype).tobytes()
            (tmp / f"{split}.bin").write_bytes(raw)
            np.save(tmp / f"{split}.docs.npy", lengths.cumsum() - lengths)
            np.save(tmp / f"{split}.labels.npy", labels[split])
            tokens[split] = int(lengths.sum())
            for part in (raw, lengths.tobytes(), labels[split].tobytes()):
                digest.update(part)
        spec = json.dumps(tokenizer.spec)
        digest.update(spec.encode())
        (tmp / "tokenizer.json").write_text(spec)
        meta = {"dtype": np.dtype(dtype).name, "vocab_size": tokenizer.vocab_size, "eot_id": tokenizer.eot_id,
                "special": tokenizer.special, "tokens": tokens, "documents": {s: len(r) for s, r in sets.items()},
                "task": task, "metrics": TASKS[task][3], "n_labels": len(classes) or 1, "classes": classes,
                "fingerprint": digest.hexdigest()}
        (tmp / "meta.json").write_text(json.dumps(meta, indent=1))
    what = f"{len(classes)} classes" if classes else "a number each"
    print(f"{out}: {len(sets['train']):,} examples, {what}, and {len(sets['val']):,} for validation; judged by "
          f"{', '.join(meta['metrics'])}; fingerprint {meta['fingerprint']}", flush=True)
