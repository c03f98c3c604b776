"""Shared by all tests: a small store of random words, and the commands run as a user runs them."""
import atexit
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}

# the smallest model with two dropped layers, and a run short enough for a test
TINY = ["--device=cpu", "--n_layer=4", "--n_head=2", "--n_embd=32", "--block_size=64", "--global_batch=8", "--batch_size=4",
        "--eval_interval=1000", "--eval_samples=8", "--save_interval=1000", "--log_interval=1", "--max_new_tokens=5", "--seed=1"]
OFF = ["--pool=off", "--seqlen=off", "--ltd=off"]
ON = ["--pool=voc:30%..100%:40%:sqrt", "--seqlen=truncate:16..64:40%", "--ltd=16..64:70%"]


def command(*args, **kw):
    """Run `python args` in the project; returns the finished process with text output. train.py and the tables run by
    warm(); with env in a python of their own, as a user's command."""
    kw.setdefault("timeout", 240)
    short = args[0] == ROOT / "train.py" or args[:2] == (ROOT / "bench.py", "table")
    python = warm() if short and "env" not in kw else [sys.executable]
    kw["env"] = {**ENV, **kw.pop("env", {})}
    return subprocess.run([*python, *map(str, args)], cwd=kw.pop("cwd", ROOT), capture_output=True, text=True, **kw)


_warm = {}


def warm():
    """["python", "warm.py", SOCKET]: python for train.py and bench.py, started already (tests/warm.py). One a test process."""
    if not _warm:
        folder = tempfile.mkdtemp()
        path = f"{folder}/socket"
        server = subprocess.Popen([sys.executable, str(ROOT / "tests" / "warm.py"), path], env=ENV, stdin=subprocess.DEVNULL)
        atexit.register(lambda: (server.kill(), shutil.rmtree(folder)))
        while not os.path.exists(path):
            assert server.poll() is None
            time.sleep(.05)
        _warm["python"] = [sys.executable, "-S", str(ROOT / "tests" / "warm.py"), path]
    return _warm["python"]


def train(*args, ranks=1, **kw):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return command(*launcher, ROOT / "train.py", *args, **kw)


def many(tmp_path, runs, ranks=2):
    """Several runs of train.py by the same ranks (tests/many.py)."""
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    ok(command("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", ROOT / "tests" / "many.py", tmp_path / "runs.json", timeout=400))


def ok(process):
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]
    return process.stdout


def refused(process, *words):
    """Exit code 2, one line, no traceback, and every word in it."""
    assert process.returncode == 2, (process.returncode, process.stdout[-1000:], process.stderr[-2000:])
    assert "Traceback" not in process.stderr and process.stderr.count("error:") >= 1, process.stderr
    for word in words:
        assert word in process.stderr, (word, process.stderr)
    return process.stderr


def trace(*files):
    """(step, rank) -> record; later lines win, as after a resume."""
    return {(r["step"], r["rank"]): r for f in files for r in map(json.loads, open(f))}


def joined(records):
    """step -> (ids, hashes, loss, lr, keep) over all ranks in order: what must not depend on their number."""
    out = {}
    for step, rank in sorted(records):
        r, old = records[step, rank], out.get(step)
        out[step] = ((old[0] if old else []) + r["sample_ids"], (old[1] if old else []) + r["ltd_hash"], r["loss"], r["lr"], r["ltd_keep"])
    return out


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return path


def make_store(folder, train, vocab=257, fingerprint="f", dtype="uint16", lengths=None):
    """A store of these tokens, written by hand; lengths: of its documents, end marks included."""
    folder.mkdir(parents=True, exist_ok=True)
    np.asarray(train, dtype).tofile(folder / "train.bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype, "vocab_size": vocab, "eot_id": 0, "tokens": {"train": len(train), "val": 0}, "fingerprint": fingerprint}))
    if lengths is not None:
        np.save(folder / "train.docs.npy", np.cumsum(lengths) - lengths)
    return folder


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A byte-level store with `voc` for T = 64: 120 documents of random words, about 400 samples."""
    folder = tmp_path_factory.mktemp("store")
    r = random.Random(0)
    words = ["".join(r.choice("abcdefghijklmnop") for _ in range(r.randint(2, 7))) for _ in range(200)]
    docs = [" ".join(r.choice(words[: r.randint(5, 200)]) for _ in range(45)) for _ in range(120)]
    write_jsonl(folder / "d.jsonl", docs)
    ok(command(ROOT / "data_analyze.py", f"--text={folder}/d.jsonl", f"--out={folder}/ds", "--tokenizer=bytes", "--block_size=64", "--val_fraction=0.1"))
    return folder / "ds"


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """300 documents of 2 to 120 bytes, with seqlen, voc and seqlen_voc for T = 64."""
    folder, r = tmp_path_factory.mktemp("docs"), np.random.default_rng(0)
    write_jsonl(folder / "d.jsonl", ["".join(map(chr, r.integers(97, 107, r.integers(2, 121)))) for _ in range(300)])
    ok(command(ROOT / "data_analyze.py", f"--text={folder}/d.jsonl", f"--out={folder}/ds", "--tokenizer=bytes", "--samples=document", "--block_size=64", "--metric=seqlen,voc,seqlen_voc"))
    return folder / "ds"
