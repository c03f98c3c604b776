"""data.py and data_analyze.py: impolite text, token stores, difficulty columns, the command line."""
import gzip
import json
import os
import random
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, command, make_store, ok, refused, write_jsonl

import data
import data_analyze
import difficulty
from tokenizer import Tokenizer

ANALYZE = ROOT / "data_analyze.py"


def prepare(text, out, *flags, **kw):
    return command(ANALYZE, f"--text={text}", f"--out={out}", "--tokenizer=bytes", "--metric=", *flags, **kw)


def tokens(folder):
    meta = json.loads((folder / "meta.json").read_text())
    return {s: np.fromfile(folder / f"{s}.bin", meta["dtype"]) for s in ("train", "val")}, meta


def as_documents(folder):
    parts, meta = tokens(folder)
    out = []
    for split in ("train", "val"):
        for piece in np.split(parts[split], np.flatnonzero(parts[split] == 256) + 1)[:-1]:
            out.append(bytes(piece[:-1].tolist()))
    return out


IMPOLITE = ["ab", "", "x<|endoftext|>y", "\ud83d", "\ufeffz", "q\r\nr"]


def test_impolite_text_is_encoded_byte_for_byte_for_any_number_of_workers(tmp_path):
    """D01 special token's spelling, D03 lone surrogate, D05 and D06 workers, D11 and D12 empty documents and lengths, D19 marks and CRLF inside."""
    file, raw = write_jsonl(tmp_path / "d.jsonl", IMPOLITE), []
    for workers in (1, 3, 16):
        out = tmp_path / f"ds{workers}"
        printed = ok(prepare(file, out, "--val_fraction=0.2", f"--workers={workers}"))
        assert "empty documents skipped: 1" in printed and "lone surrogates replaced: 1" in printed
        parts, meta = tokens(out)
        assert sum(map(len, parts.values())) == 33 and sum(int((p == 256).sum()) for p in parts.values()) == 5
        assert sorted(as_documents(out)) == sorted([b"ab", b"x<|endoftext|>y", b"\xef\xbf\xbd", b"\xef\xbb\xbfz", b"q\r\nr"])
        starts = np.load(out / "train.docs.npy")
        assert np.diff(np.append(starts, len(parts["train"]))).tolist() == [3, 16, 4, 5] and meta["documents"] == {"train": 4, "val": 1}
        raw.append([p.tobytes() for p in parts.values()])
    assert raw[0] == raw[1] == raw[2]


def test_gzip_folders_and_plain_files_give_the_same_tokens(tmp_path):
    """D19: a byte-order mark is dropped at the start of a file, and only there."""
    docs = ["one", "two \ufeff mark", "three"]
    (tmp_path / "a").mkdir()
    plain = write_jsonl(tmp_path / "a" / "d.jsonl", docs)
    with gzip.open(tmp_path / "d.jsonl.gz", "wb") as f:
        f.write(b"\xef\xbb\xbf" + plain.read_bytes())
    (tmp_path / "b").mkdir()
    for i, d in enumerate(docs):
        (tmp_path / "b" / f"{i}.txt").write_bytes((b"\xef\xbb\xbf" if i == 0 else b"") + d.encode())
    for i, source in enumerate((tmp_path / "a", tmp_path / "d.jsonl.gz", tmp_path / "b")):
        ok(prepare(source, tmp_path / f"out{i}", "--val_fraction=0"))
        assert as_documents(tmp_path / f"out{i}") == [d.encode() for d in docs]


def test_zst_parquet_and_standard_input_give_the_same_tokens(tmp_path):
    """The optional packages are asked for by name where they are missing, and a file cut short is refused, not read in part."""
    docs = [f"document {i} \u00e9" for i in range(3000)]
    plain = write_jsonl(tmp_path / "d.jsonl", docs)
    ok(prepare(plain, tmp_path / "want", "--val_fraction=0"))
    want = (tmp_path / "want" / "train.bin").read_bytes()
    for name, flags, piped in (("jsonl", ["--text=-.jsonl"], plain.read_text()), ("text", ["--text=-"], docs[0])):
        ok(command(ANALYZE, *flags, f"--out={tmp_path}/{name}", "--tokenizer=bytes", "--metric=", "--val_fraction=0", input=piped))
    assert (tmp_path / "jsonl" / "train.bin").read_bytes() == want and as_documents(tmp_path / "text") == [docs[0].encode()]
    refused(command(ANALYZE, "--text=-", f"--out={tmp_path}/x", input="x"), "read only once")
    try:
        import zstandard
        packed = zstandard.ZstdCompressor().compress(plain.read_bytes()[:1000]) + zstandard.ZstdCompressor().compress(plain.read_bytes()[1000:])
        (tmp_path / "d.jsonl.zst").write_bytes(packed)      # two frames: the line over the joint is whole again
        ok(prepare(tmp_path / "d.jsonl.zst", tmp_path / "zst", "--val_fraction=0"))
        assert (tmp_path / "zst" / "train.bin").read_bytes() == want
        for cut in (packed[:-5], packed[:20], b"no zst at all"):
            (tmp_path / "c.jsonl.zst").write_bytes(cut)
            refused(prepare(tmp_path / "c.jsonl.zst", tmp_path / "x"), "c.jsonl.zst cannot be read to its end")
    except ImportError:
        (tmp_path / "d.jsonl.zst").write_bytes(b"x")
        refused(prepare(tmp_path / "d.jsonl.zst", tmp_path / "x"), "d.jsonl.zst needs the package zstandard: pip install zstandard")
    try:
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({"text": docs, "n": range(3000)}), tmp_path / "d.parquet", row_group_size=700)
        ok(prepare(tmp_path / "d.parquet", tmp_path / "parquet", "--val_fraction=0"))
        assert (tmp_path / "parquet" / "train.bin").read_bytes() == want
        refused(prepare(tmp_path / "d.parquet", tmp_path / "x", "--text_key=body"), "no column 'body'", "['n', 'text']")
        refused(prepare(tmp_path / "d.parquet", tmp_path / "x", "--text_key=n"), "row 1", "--text_key")
        (tmp_path / "e.parquet").write_bytes((tmp_path / "d.parquet").read_bytes()[:-100])
        refused(prepare(tmp_path / "e.parquet", tmp_path / "x"), "e.parquet cannot be read to its end")
    except ImportError:
        (tmp_path / "d.parquet").write_bytes(b"x")
        refused(prepare(tmp_path / "d.parquet", tmp_path / "x"), "d.parquet needs the package pyarrow: pip install pyarrow")


def test_text_is_read_as_utf8_whatever_the_locale(tmp_path):
    """D17."""
    (tmp_path / "t.txt").write_bytes("caf\u00e9".encode())
    ok(prepare(tmp_path / "t.txt", tmp_path / "o", "--val_fraction=0", env={"LC_ALL": "C", "PYTHONUTF8": "0"}))
    assert as_documents(tmp_path / "o") == ["caf\u00e9".encode()]


@pytest.mark.parametrize("name,content,words", [
    ("b.txt", b"ok\xff\xfe\n", ["b.txt", "byte 2", "--errors=replace"]),                            # D18
    ("e.txt", b"", ["e.txt", "no tokens"]),                                                         # D09
    ("c.jsonl", b'{"text":"ok"}\n{"text": "a\n', ["line 2", "--skip_bad"]),                         # D20
    ("f.jsonl", b'{"content":"ok"}\n', ["'text'", "content", "--text_key"]),                        # D09
    ("g.jsonl", b'{"text":7}\n', ["line 1", "--text_key"]),
    ("n.jsonl", b'{"text":"ok"}\n{"text":null}\n', ["line 2", "--text_key"]),
    ("i.jsonl", b'{"text":' + b"1" * 5000 + b"}\n", ["line 1", "--skip_bad"]),
    ("j.jsonl", b"[" * 200_000 + b"\n", ["line 1", "--skip_bad"]),
    ("k.txt.gz", gzip.compress(b"packed", mtime=0), ["k.txt.gz is packed"]),
    ("h.jsonl.gz", gzip.compress(b'{"text":"ok"}\n' * 99, mtime=0)[:-9], ["h.jsonl.gz", "to its end"])])
def test_unusable_input_is_refused_by_file_and_place_and_leaves_nothing(tmp_path, name, content, words):
    """D09, D18, D20."""
    (tmp_path / name).write_bytes(content)
    refused(prepare(tmp_path / name, tmp_path / "out"), *words)
    assert os.listdir(tmp_path) == [name]


def test_repairs_are_opt_in_and_counted(tmp_path):
    """D18, D20."""
    (tmp_path / "b.txt").write_bytes(b"ok\xff\xfe\n")
    assert "bytes replaced: 1" in ok(prepare(tmp_path / "b.txt", tmp_path / "o1", "--errors=replace"))
    (tmp_path / "c.jsonl").write_bytes(b'{"text":"ok"}\n{"text": "a\n{bad\n')
    refused(prepare(tmp_path / "c.jsonl", tmp_path / "o2", "--skip_bad=1"), "line 3")
    assert "malformed lines skipped: 2" in ok(prepare(tmp_path / "c.jsonl", tmp_path / "o2", "--skip_bad=2"))


def test_long_runs_of_one_character_are_encoded_in_seconds():
    """D02: a million carets or blanks and 300,000 CJK letters, under a pattern whose engine overflows on the blanks."""
    t = Tokenizer({"kind": "bpe", "pattern": data_analyze.PATTERN, "ranks": [chr(i) for i in range(256)]})
    for text in ("^" * 1_000_000, " " * 1_000_000, "a" + "\n " * 300_000 + "b", "\u6f22" * 300_000):
        start = time.time()
        ids = t.encode(text)
        assert time.time() - start < 10 and t.decode(ids) == text
    mixed = "some words before" + " " * 70_000 + "and words behind, " * 10_000     # only the run itself is cut
    tail = mixed[mixed.rindex("  ") + 2:]
    assert t.encode(mixed).tolist()[-len(t.encode(tail)):] == t.encode(tail).tolist() and t.decode(t.encode(mixed)) == mixed


def test_a_named_encoding_without_its_file_is_refused_in_seconds(tmp_path):
    """D04: no network, empty cache; the folder variable is named and nothing is left behind. (With a network it is fetched.)"""
    (tmp_path / "t.txt").write_text("some text")
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "none"), "HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    start = time.time()
    p = command(ANALYZE, f"--text={tmp_path}/t.txt", f"--out={tmp_path}/out", "--tokenizer=gpt2", env=env)
    refused(p, "TIKTOKEN_CACHE_DIR", "gpt2")
    assert time.time() - start < 30 and not (tmp_path / "out").exists()
    refused(command(ANALYZE, f"--text={tmp_path}/t.txt", f"--out={tmp_path}/out", "--tokenizer=gtp2"), "gtp2", "o200k_base")


PLUGIN = '''
def small():
    return dict(name="plug", pat_str=r"\\s+|\\S+", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={"<|endoftext|>": 100257})
ENCODING_CONSTRUCTORS = {"plug": small}
'''


def test_tiktoken_plugins_work_and_a_large_vocabulary_takes_four_bytes(tmp_path):
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "plug.py").write_text(PLUGIN)
    (tmp_path / "t.txt").write_text("ab<|endoftext|>")
    ok(command(ANALYZE, f"--text={tmp_path}/t.txt", f"--out={tmp_path}/o", "--tokenizer=plug", "--metric=", "--val_fraction=0", env={"PYTHONPATH": str(tmp_path)}))
    parts, meta = tokens(tmp_path / "o")
    assert meta["dtype"] == "uint32" and meta["vocab_size"] == 100258 and parts["train"].tolist() == [*b"ab<|endoftext|>", 100257]
    code = f"import json, tokenizer; print(tokenizer.Tokenizer(json.load(open({str(tmp_path / 'o' / 'tokenizer.json')!r}))).decode([97, 5000, 100257]))"
    assert ok(command("-c", code, env={"PYTHONPATH": str(tmp_path)})) == "a\ufffd<|endoftext|>\n"      # a hole in the vocabulary


def test_trained_tokenizer_is_saved_reused_and_lossless(tmp_path):
    docs = [f"def f{i}(x):\n    return x + {i}  # caf\u00e9 \U0001f600" for i in range(200)]
    file = write_jsonl(tmp_path / "d.jsonl", docs)
    ok(command(ANALYZE, f"--text={file}", f"--out={tmp_path}/a", "--vocab_size=300", "--block_size=64"))
    ok(command(ANALYZE, f"--text={file}", f"--out={tmp_path}/b", f"--tokenizer={tmp_path}/a/tokenizer.json", "--block_size=64", "--workers=1"))
    assert (tmp_path / "a" / "train.bin").read_bytes() == (tmp_path / "b" / "train.bin").read_bytes()
    t = Tokenizer(json.loads((tmp_path / "a" / "tokenizer.json").read_text()))
    parts, meta = tokens(tmp_path / "a")
    assert t.vocab_size == meta["vocab_size"] == 300 and t.eot_id == 299
    assert t.decode(parts["train"]) + t.decode(parts["val"]) == "".join(d + "<|endoftext|>" for i, d in enumerate(docs) if (i + 1) % 20) + \
        "".join(d + "<|endoftext|>" for i, d in enumerate(docs) if not (i + 1) % 20)


def test_few_documents_still_give_a_validation_split(tmp_path):
    """D10: ten documents, a tenth: one document; one document: the last share of its tokens, and it is said."""
    ok(prepare(write_jsonl(tmp_path / "d.jsonl", ["abc"] * 10), tmp_path / "ten", "--val_fraction=0.1"))
    assert [len(p) for p in tokens(tmp_path / "ten")[0].values()] == [36, 4]
    assert "the last 1 of them are the validation split" in ok(prepare(write_jsonl(tmp_path / "e.jsonl", ["abc", "de", "f"]), tmp_path / "three", "--val_fraction=0.1"))
    assert [len(p) for p in tokens(tmp_path / "three")[0].values()] == [7, 2]
    docs = ["a" * 500, "b" * 300, "c" * 200, "d"]      # the last one alone is too small a share
    ok(prepare(write_jsonl(tmp_path / "f.jsonl", docs), tmp_path / "four", "--val_fraction=0.1"))
    assert [len(p) for p in tokens(tmp_path / "four")[0].values()] == [802, 203]
    (tmp_path / "one.txt").write_text("x" * 999)
    assert "validation split" in ok(prepare(tmp_path / "one.txt", tmp_path / "one", "--val_fraction=0.1"))
    assert [len(p) for p in tokens(tmp_path / "one")[0].values()] == [900, 100]


def test_an_existing_store_is_kept_unless_told_otherwise(tmp_path):
    (tmp_path / "t.txt").write_text("x" * 999)
    ok(prepare(tmp_path / "t.txt", tmp_path / "o"))
    refused(prepare(tmp_path / "t.txt", tmp_path / "o"), "--overwrite")
    ok(prepare(tmp_path / "t.txt", tmp_path / "o", "--overwrite"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x" * 999)
    refused(prepare(tmp_path / "t.txt", tmp_path / "mine", "--overwrite"), "thesis.txt", "no part of a store")
    (tmp_path / "mine" / "meta.json").write_text("{}")          # somebody's file of that name does not make it a store
    refused(prepare(tmp_path / "t.txt", tmp_path / "mine", "--overwrite"), "thesis.txt")
    (tmp_path / "o" / "T256").mkdir(exist_ok=True)
    (tmp_path / "o" / "T256" / "my_metric.py").write_text("")
    refused(prepare(tmp_path / "t.txt", tmp_path / "o", "--overwrite"), "my_metric.py")
    (tmp_path / "link").symlink_to(tmp_path / "o")
    refused(prepare(tmp_path / "t.txt", tmp_path / "link", "--overwrite"), "link")
    refused(prepare(tmp_path / "t.txt", tmp_path / "t.txt" / "x"), "below a file")
    refused(prepare(tmp_path / "mine", tmp_path / "mine", "--overwrite"), "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_one_window_needs_one_token_more_than_its_length(tmp_path):
    """D08: 65 tokens hold exactly one sample of 64, 64 hold none. S05: a split that is not there is refused."""
    assert data.Store(make_store(tmp_path / "a", np.arange(65)), "train", 64).n_samples == 1
    with pytest.raises(ValueError, match="needs 65"):
        data.Store(make_store(tmp_path / "b", np.arange(64)), "train", 64)
    with pytest.raises(ValueError, match="val.bin has 0 tokens"):
        data.Store(tmp_path / "a", "val", 64)
    with pytest.raises(ValueError, match="meta.json"):
        data.Store(tmp_path / "nowhere", "train", 64)


def test_samples_share_one_token_with_the_next_and_none_is_lost(tmp_path):
    s = data.Store(make_store(tmp_path / "a", np.arange(200)), "train", 10)
    rows = s.rows(np.arange(s.n_samples))
    assert rows.shape == (19, 11) and rows[:, 0].tolist() == list(range(0, 190, 10)) and (rows[:-1, -1] == rows[1:, 0]).all()


def test_damaged_stores_are_refused_by_name(tmp_path):
    folder = make_store(tmp_path / "a", np.arange(200) % 100, vocab=50)
    with pytest.raises(ValueError, match="vocab_size is 50"):
        data.Store(folder, "train", 10).rows(np.array([9]))
    os.truncate(folder / "train.bin", 399)
    with pytest.raises(ValueError, match="train.bin"):
        data.Store(folder, "train", 10)
    negative = make_store(tmp_path / "n", [1, 2, -1, 3, 0] * 5, dtype="int32", lengths=[5] * 5)
    for samples in ("window", "document"):
        with pytest.raises(ValueError, match="holds token -1"):
            data.Store(negative, "train", 4, samples).rows(np.array([0]))
    with pytest.raises(ValueError, match="holds tokens from -1 to 3"):
        difficulty.analyze(negative, 4, ["voc"])
    for content, word in (("{", "damaged"), ("{}", "lacks tokens"), ("[]", "lacks"), ("3", "damaged")):
        (folder / "meta.json").write_text(content)
        with pytest.raises(ValueError, match=word):
            data.Store(folder, "train", 10)


VOC = {(0, 0, 1): 3.1260, (2, 3, 4): 6.5917}


def test_voc_is_the_sum_of_unigram_surprise(tmp_path):
    """Counts [4, 2, 1, 1, 0] become p = [4, 2, 1, 1, 1] / 9."""
    surprise = difficulty.unigram_surprise([np.array([0, 0, 0, 0], np.uint16), np.array([1, 1, 2, 3], np.uint16)], 5)
    assert surprise.tolist() == pytest.approx([.8109, 1.5041, 2.1972, 2.1972, 2.1972], abs=5e-5)
    for sample, want in VOC.items():
        assert surprise[list(sample)].sum() == pytest.approx(want, abs=1e-4)
    assert surprise[[0, 1, 2, 3]].sum() == pytest.approx(6.7094, abs=1e-4)     # published from rounded terms
    stream = np.random.default_rng(0).integers(0, 20, 5001)
    s = data.Store(make_store(tmp_path / "a", stream, vocab=20), "train", 50)
    p = np.bincount(stream, minlength=20) / 5001
    by_hand = [-np.log(p[stream[i * 50:i * 50 + 50]]).sum() for i in range(100)]
    assert difficulty.compute(s, "voc").tolist() == pytest.approx(by_hand, rel=1e-12)


def test_a_column_of_other_data_is_refused_with_the_command_that_mends_it(tmp_path):
    folder = make_store(tmp_path / "a", np.arange(201) % 20, vocab=20)
    with pytest.raises(ValueError, match=r"data_analyze.py --data=.* --block_size=10 --metric=voc"):
        data.Store(folder, "train", 10).column("voc")
    for metric, hint in (("loss", "--metric=loss --checkpoint="), ("f", "--metric=FILE.py:f"), ("seqlen", "--metric=seqlen --samples=document")):
        with pytest.raises(ValueError, match=hint):
            data.Store(folder, "train", 10).column(metric)
    difficulty.analyze(folder, 10, ["voc"])
    assert len(data.Store(folder, "train", 10).column("voc")) == 20
    make_store(tmp_path / "a", np.arange(201) % 19, vocab=20, fingerprint="g")
    with pytest.raises(ValueError, match="belongs to other data"):
        data.Store(folder, "train", 10).column("voc")


def anonymous_memory():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_a_large_store_is_read_without_memory_or_file_growth(tmp_path):
    """D21: 2 GiB sparse, 2,000 random batches: anonymous memory and open files stay level (page cache may grow)."""
    folder = make_store(tmp_path / "a", np.zeros(1))
    os.truncate(folder / "train.bin", 1 << 31)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"tokens": {"train": 1 << 30, "val": 0}}))
    s, r = data.Store(folder, "train", 256), np.random.default_rng(0)
    s.rows(r.integers(s.n_samples, size=8))
    before, files = anonymous_memory(), len(os.listdir("/proc/self/fd"))
    for _ in range(2000):
        s.rows(r.integers(s.n_samples, size=8))
    assert anonymous_memory() - before < 20_000 and len(os.listdir("/proc/self/fd")) == files       # 20 MB: allocator slack


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's RLIMIT_DATA")
def test_a_large_store_is_analysed_without_memory_growth(tmp_path):
    """2 GiB sparse (a billion tokens) with 400 MB of private memory allowed. What grows is the column: 35 bytes a sample of 256 tokens
    while it is sorted. `SPARSE_GB=10` takes another size."""
    size = int(os.environ.get("SPARSE_GB", 2)) << 30
    folder = make_store(tmp_path / "a", np.zeros(1))
    os.truncate(folder / "train.bin", size)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"tokens": {"train": size // 2, "val": 0}}))
    limit = 250 + 75 * (size >> 30)     # MB: Python, numpy and two threads' chunks; 2M samples a GiB
    code = f"import resource, difficulty; resource.setrlimit(resource.RLIMIT_DATA, ({limit} << 20,) * 2); difficulty.analyze({str(folder)!r}, 256, ['voc'], workers=2)"
    assert f"{(size // 2 - 1) // 256:,} samples" in ok(command("-c", code))


def test_encoding_holds_a_bounded_part_of_the_corpus(tmp_path):
    """D22: 60 MB of text with 16 workers; what is in flight is 4 batches of 1 MB a worker, so the peak stays far below
    what the tokens of the whole corpus (4 bytes each while encoded: 240 MB) would need on top of it."""
    r = random.Random(0)
    line = json.dumps({"text": "".join(r.choice("abcdefgh ") for _ in range(100_000))}) + "\n"
    (tmp_path / "d.jsonl").write_text(line * 600)
    code = (f"import sys, resource; sys.argv = ['x', '--text={tmp_path}/d.jsonl', '--out={tmp_path}/o', '--tokenizer=bytes', '--workers=4', '--metric='];"
            "import data_analyze; base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; data_analyze.main();"
            "print('grew', (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024)")
    grew = int(ok(command("-c", code)).split("grew")[1])
    assert grew < 150, f"{grew} MB"


def test_prefetch_keeps_order_hands_on_errors_and_ends_its_thread():
    """S08, R13: the same items as without a thread, and an error arrives where it can be reported."""
    assert list(data.prefetch(lambda i: i * i, 3, 40)) == [i * i for i in range(3, 40)]
    items = data.prefetch(lambda i: 1 // (5 - i), 0, 10)
    with pytest.raises(ZeroDivisionError):
        list(items)
    made = []
    items = data.prefetch(lambda i: made.append(i), 0, 1000)
    next(items)
    items.close()
    assert len(made) <= 4


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path):
    data.write_atomic(tmp_path / "f", lambda f: f.write(b"old"))
    with pytest.raises(ZeroDivisionError):
        data.write_atomic(tmp_path / "f", lambda f: f.write(b"n" * (1 // 0)))
    assert os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_bytes() == b"old"


@pytest.mark.parametrize("flags,words", [(["--bock_size=4"], ["bock_size", "--block_size"]), (["block_size=4"], ["--block_size=4"]), (["--block_size=abc"], ["block_size"]),
                                         (["--metric=rarity"], ["rarity", "voc"]), (["--text=/nowhere", "--out=x"], ["/nowhere"]), (["--data=x", "--text=y"], ["--data"]), (["--block_size=0"], ["block_size"]), (["--data=x", "--tokenizer=bytes"], ["--tokenizer"]), (["--workers=-1"], ["workers"]),
                                         (["--text="], ["--text is empty"]), (["--show"], ["--data=FOLDER"]), (["--tokenizer=bytes", "--vocab_size=5000"], ["no effect"])])
def test_misspelt_flags_are_answered_with_the_near_one(flags, words):
    """G01."""
    refused(command(ANALYZE, *flags), *words)


# -----------------------------------------------------------------------------
# stores of other projects, read in place


def test_a_nanogpt_file_an_llmc_shard_and_a_megatron_pair_give_the_same_samples(tmp_path):
    """The same 1,000 tokens in three formats (and our own); training and validation by the files' names; nothing is written."""
    stream, T = np.random.default_rng(0).integers(0, 50257, 1000).astype(np.uint16), 32
    for name in ("ours", "nanogpt", "llmc", "megatron"):
        (tmp_path / name).mkdir()
    make_store(tmp_path / "ours", stream, vocab=50257)
    stream.tofile(tmp_path / "nanogpt" / "train.bin")
    stream[:100].tofile(tmp_path / "nanogpt" / "val.bin")
    for split, part in (("train", stream), ("val", stream[:100])):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(part)
        (tmp_path / "llmc" / f"fineweb_{split}_000001.bin").write_bytes(header.tobytes() + part.tobytes())
        lengths = np.array([10, len(part) - 10], np.int32)
        pointers = np.array([0, 20], np.int64)
        index = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8]) + (2).to_bytes(8, "little") + (3).to_bytes(8, "little")
        (tmp_path / "megatron" / f"my_{split}_document.idx").write_bytes(index + lengths.tobytes() + pointers.tobytes() + np.arange(3).tobytes())
        part.tofile(tmp_path / "megatron" / f"my_{split}_document.bin")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    stores = {n: data.Store(tmp_path / n, "train", T) for n in ("ours", "nanogpt", "llmc", "megatron")}
    ids = np.array([30, 0, 7])
    for s in stores.values():
        assert s.n_samples == 31 and np.array_equal(s.rows(ids), stores["ours"].rows(ids))
    assert all(data.Store(tmp_path / n, "val", T).n_samples == 3 for n in ("nanogpt", "llmc", "megatron"))
    assert len({s.meta["fingerprint"] for s in stores.values()}) == 4 and before == sorted(p.name for p in tmp_path.rglob("*"))
    for n in ("llmc", "megatron"):
        difficulty.analyze(tmp_path / n, T, ["voc"])
    assert np.array_equal(data.Store(tmp_path / "llmc", "train", T).column("voc"), data.Store(tmp_path / "megatron", "train", T).column("voc"))


def test_samples_run_through_several_shards_in_order_and_never_across_two(tmp_path):
    streams = [np.arange(i * 1000, i * 1000 + n).astype(np.uint16) for i, n in enumerate((65, 40, 129))]        # 2, 1 and 4 samples of 32
    for i, part in enumerate(streams):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(part)
        (tmp_path / f"x_train_{i}.bin").write_bytes(header.tobytes() + part.tobytes())
    s = data.Store(tmp_path, "train", 32)
    assert s.n_samples == 7
    assert s.rows(np.arange(7))[:, 0].tolist() == [0, 32, 1000, 2000, 2032, 2064, 2096]
    assert s.rows(np.array([6, 0, 2, 6]))[:, -1].tolist() == [2128, 32, 1032, 2128]
    assert np.array_equal(np.concatenate([s.inputs(i, min(i + 3, 7))[0] for i in range(0, 7, 3)]), s.rows(np.arange(7))[:, :-1])


def test_damaged_foreign_stores_are_refused_by_name(tmp_path):
    np.zeros(100, np.uint16).tofile(tmp_path / "train.bin")
    (tmp_path / "train.idx").write_bytes(b"something else" * 9)
    with pytest.raises(ValueError, match="train.idx"):
        data.Store(tmp_path, "train", 8)
    (tmp_path / "train.idx").unlink()
    index = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8]) + (2).to_bytes(8, "little") + (3).to_bytes(8, "little")
    for lengths, word in (([60, 30], "200 bytes, 180 are promised"), ([60], "cut short")):
        (tmp_path / "train.idx").write_bytes(index + np.array(lengths, np.int32).tobytes())
        with pytest.raises(ValueError, match=word):
            data.Store(tmp_path, "train", 8)
    (tmp_path / "train.idx").unlink()
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, -5
    (tmp_path / "train.bin").write_bytes(header.tobytes() + b"xx")
    with pytest.raises(ValueError, match="train.bin"):
        data.Store(tmp_path, "train", 8)
    header[:3] = 20240520, 1, 5000
    (tmp_path / "train.bin").write_bytes(header.tobytes() + b"xx")
    with pytest.raises(ValueError, match="train.bin has 1026 bytes, 11024 are promised"):
        data.Store(tmp_path, "train", 8)


# -----------------------------------------------------------------------------
# more metrics


def test_the_users_own_metric_is_computed_saved_and_shown(tmp_path, store):
    (tmp_path / "mine.py").write_text("def spread(tokens, mask):\n    assert tokens.shape == mask.shape and mask.all()\n    return tokens.max(1) - tokens.min(1).astype(int)\n"
                                      "def wrong(tokens, mask):\n    return tokens\ndef one(x): return x\ndef voc(tokens, mask): return tokens[:, 0]\n")
    folder = make_store(tmp_path / "a", np.arange(700) % 19, vocab=20)
    ok(command(ANALYZE, f"--data={folder}", "--block_size=7", f"--metric={tmp_path}/mine.py:spread"))
    s = data.Store(folder, "train", 7)
    assert s.column("spread").tolist() == [int(np.ptp(r[:-1])) for r in s.rows(np.arange(s.n_samples))]
    printed = ok(command(ANALYZE, f"--data={folder}", "--block_size=7", "--metric=spread,spread".split(",")[0].replace("spread", f"{tmp_path}/mine.py:spread"), "--show"))
    assert "easiest: sample" in printed and "hardest: sample" in printed and (folder / "T7" / "spread.png").exists()
    refused(command(ANALYZE, f"--data={folder}", "--block_size=7", f"--metric={tmp_path}/mine.py:wrong"), "shape")
    refused(command(ANALYZE, f"--data={folder}", "--block_size=7", f"--metric={tmp_path}/mine.py:one"), "(tokens (N, T)")
    refused(command(ANALYZE, f"--data={folder}", "--block_size=7", f"--metric={tmp_path}/mine.py:voc"), "built-in")
    refused(command(ANALYZE, f"--data={folder}", f"--metric=a/x.py:f,{tmp_path}/mine.py:f"), "two columns of one name")
    assert s.column(f"{tmp_path}/mine.py:spread")[0] == s.column("spread")[0]
    (tmp_path / "mine.py").write_text("def spread(tokens, mask):\n    return -tokens[:, 0]\n")     # int64 arrives: no wrapping round
    with pytest.raises(ValueError, match="was made by another .*mine.py:spread"):
        s.column(f"{tmp_path}/mine.py:spread")
    ok(command(ANALYZE, f"--data={folder}", "--block_size=7", f"--metric={tmp_path}/mine.py:spread"))
    assert s.column("spread").min() == -18
    assert s.column("my.py:spread")[0] == s.column("spread")[0]


def test_a_column_that_is_killed_while_it_is_made_again_is_no_column(tmp_path):
    folder = make_store(tmp_path / "a", np.arange(201) % 20, vocab=20)
    difficulty.analyze(folder, 10, ["voc"])
    code = f"""import os, difficulty
write = difficulty.write_atomic
def killed(path, f):
    if str(path).endswith('.rank.npy'): os._exit(9)
    write(path, f)
difficulty.write_atomic = killed
difficulty.analyze({str(folder)!r}, 10, ['voc'])"""
    assert command("-c", code).returncode == 9
    with pytest.raises(ValueError, match="voc.npy is missing"):
        data.Store(folder, "train", 10).column("voc")


def test_zlib_is_compressed_over_raw_bytes(store):
    difficulty.analyze(store, 64, ["zlib"])
    import zlib
    s = data.Store(store, "train", 64)
    values, x = s.column("zlib"), s.rows(np.array([5]))[0, :-1]
    raw = b"".join(bytes([t]) if t < 256 else b"<|endoftext|>" for t in x.tolist())
    assert values[5] == len(zlib.compress(raw)) / len(raw)


def test_loss_is_the_mean_loss_under_a_checkpoint(store, tmp_path):
    import torch
    from conftest import OFF, TINY, train

    from model import GPT
    ok(train(*TINY, *OFF, f"--data={store}", f"--out={tmp_path}/run", "--train_tokens=2000"))
    checkpoint = next((tmp_path / "run").glob("ckpt_*.pt"))
    ok(command(ANALYZE, f"--data={store}", "--block_size=64", "--metric=loss", f"--checkpoint={checkpoint}"))
    model = GPT(257, 64, 4, 2, 32)
    model.load_state_dict(torch.load(checkpoint)["model"])
    s = data.Store(store, "train", 64)
    rows = torch.from_numpy(s.rows(np.array([3, 200])))
    with torch.no_grad():
        want = [model(r[None, :-1], r[None, 1:]).item() / 64 for r in rows]
    assert s.column("loss")[[3, 200]].tolist() == pytest.approx(want, rel=1e-5)     # float32, other order of sums
    refused(command(ANALYZE, f"--data={store}", "--metric=loss"), "--checkpoint")
    other = make_store(tmp_path / "a", np.arange(700) % 19, vocab=20)
    refused(command(ANALYZE, f"--data={other}", "--block_size=64", "--metric=loss", f"--checkpoint={checkpoint}"), "vocabulary of 257", "20")
