"""parts.py and data_analyze.py: the same bytes by one process, by parts under any scheduler, by ranks under torchrun."""
import json
import os
import random
import shutil

import numpy as np
import pytest
from conftest import ROOT, command, make_store, ok, refused, write_jsonl

ANALYZE = ROOT / "data_analyze.py"
FLAGS = ["--tokenizer=bytes", "--val_fraction=0.2", "--block_size=16", "--metric=voc"]


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Seven files of very different sizes, one of them empty of text."""
    folder, r = tmp_path_factory.mktemp("texts"), random.Random(1)
    for i, n in enumerate((3, 40, 1, 0, 12, 5, 90)):
        write_jsonl(folder / f"{i}.jsonl", ["".join(r.choice("abcd ") for _ in range(r.randint(1, 60))) for _ in range(n)] + [""] * (i == 3))
    out = folder.parent / "whole"
    ok(command(ANALYZE, f"--text={folder}", f"--out={out}", *FLAGS))
    return folder, contents(out)


@pytest.mark.parametrize("n", [1, 3, 9])
def test_any_number_of_parts_in_any_order_gives_the_same_store(texts, tmp_path, n):
    folder, want = texts
    order = list(range(1, n + 1))
    random.Random(n).shuffle(order)
    for k in order:
        ok(command(ANALYZE, f"--text={folder}", f"--out={tmp_path}/o", *FLAGS, "--stage=map", f"--part={k}/{n}"))
        assert not (tmp_path / "o").exists()
    ok(command(ANALYZE, f"--text={folder}", f"--out={tmp_path}/o", *FLAGS, "--stage=reduce"))
    assert contents(tmp_path / "o") == want and os.listdir(tmp_path) == ["o"]


def test_ranks_of_torchrun_give_the_same_store_and_columns(texts, tmp_path):
    folder, want = texts
    ok(command("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", ANALYZE, f"--text={folder}", f"--out={tmp_path}/o", *FLAGS))
    assert contents(tmp_path / "o") == want and os.listdir(tmp_path) == ["o"]


def test_missing_and_stale_parts_are_named_and_done_ones_are_not_made_again(texts, tmp_path):
    folder = shutil.copytree(texts[0], tmp_path / "texts")
    map_part = lambda k: command(ANALYZE, f"--text={folder}", f"--out={tmp_path}/o", *FLAGS, "--stage=map", f"--part={k}/3")
    reduce = lambda: command(ANALYZE, f"--text={folder}", f"--out={tmp_path}/o", *FLAGS, "--stage=reduce")
    refused(reduce(), "holds no part", "--stage=map --part=K/N")
    ok(map_part(1))
    stamp = (tmp_path / "o.parts" / "00001-of-00003.bin").stat().st_mtime_ns
    refused(reduce(), "part 2 is missing, part 3 is missing", f"--text={folder} --out={tmp_path}/o {' '.join(FLAGS)} --stage=map --part=2/3")
    ok(map_part(2))
    ok(map_part(3))
    assert "is there already" in ok(map_part(1)) and (tmp_path / "o.parts" / "00001-of-00003.bin").stat().st_mtime_ns == stamp
    write_jsonl(folder / "6.jsonl", ["other text"] * 50)         # the corpus changes: every part is stale until made anew
    refused(reduce(), "part 1 is of other data or settings")
    assert "already" not in ok(map_part(1))
    refused(reduce(), "part 2 is of other data or settings", "--part=2/3")
    ok(map_part(2))
    ok(map_part(3))
    ok(reduce())
    ok(command(ANALYZE, f"--text={folder}", f"--out={tmp_path}/again", *FLAGS))
    assert contents(tmp_path / "o") == contents(tmp_path / "again")


def test_columns_by_parts_equal_columns_by_one_process(tmp_path):
    """A store of 9 chunks: 11 parts (two of them without work), 2 ranks."""
    stream = np.random.default_rng(0).integers(0, 5000, 35_000_017)
    (tmp_path / "mine.py").write_text("def mean(tokens, mask):\n    return tokens.mean(1)\n")
    folder = make_store(tmp_path / "s", stream, vocab=5000, fingerprint="f")
    flags = [ANALYZE, f"--data={folder}", "--block_size=1024", f"--metric=voc,{tmp_path}/mine.py:mean"]
    ok(command(*flags))
    want = contents(folder / "T1024")
    shutil.rmtree(folder / "T1024")
    ok(command("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *flags))
    assert contents(folder / "T1024") == want
    shutil.rmtree(folder / "T1024")
    (folder / "T1024").mkdir()
    for k in (11, 3, 4, 8, 1, 9, 2, 10, 6, 7):
        ok(command(*flags, "--stage=map", f"--part={k}/11"))
    refused(command(*flags, "--stage=reduce"), "voc.parts", "part 5 is missing", "mine.py:mean --stage=map --part=5/11")
    ok(command(*flags, "--stage=map", "--part=5/11"))
    ok(command(*flags, "--stage=reduce"))
    assert contents(folder / "T1024") == want


@pytest.mark.parametrize("flags,words", [(["--stage=map"], ["--part=3/64"]), (["--part=1/2"], ["--stage=map"]), (["--stage=map", "--part=3/2"], ["K/N"]), (["--stage=map", "--part=0/2"], ["K/N"]),
                                         (["--stage=reduced"], ["map or reduce"]), (["--text=-", "--out=x", "--tokenizer=bytes", "--stage=map", "--part=1/2"], ["no parts"])])
def test_stages_that_fit_nothing_are_refused(flags, words):
    refused(command(ANALYZE, *flags), *words)


def test_a_rank_that_fails_ends_all(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.txt").write_text("fine")
    (tmp_path / "t" / "b.txt").write_bytes(b"\xff\xff\xff\xff")
    p = command("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ANALYZE, f"--text={tmp_path}/t", f"--out={tmp_path}/o", "--tokenizer=bytes", timeout=60)
    assert p.returncode and "b.txt: byte 0" in p.stderr and not (tmp_path / "o").exists()
    assert json.loads((tmp_path / "o.parts" / "00001-of-00002.json").read_text())["key"]      # what was done stays done


def test_reduce_never_deletes_what_is_not_its_own(tmp_path):
    (tmp_path / "o.parts").mkdir()
    (tmp_path / "o.parts" / "a.txt").write_text("mine")
    refused(command(ANALYZE, f"--text={tmp_path}/o.parts", f"--out={tmp_path}/o", *FLAGS, "--stage=map", "--part=1/1"), "o.parts")
    (tmp_path / "b.txt").write_text("x" * 99)
    for stage in (["--stage=map", "--part=1/1"], ["--stage=reduce"]):
        ok(command(ANALYZE, f"--text={tmp_path}/b.txt", f"--out={tmp_path}/o", *FLAGS, *stage))
    assert os.listdir(tmp_path / "o.parts") == ["a.txt"]


def test_lines_skipped_are_counted_over_all_parts(tmp_path):
    (tmp_path / "t").mkdir()
    for i in range(3):
        (tmp_path / "t" / f"{i}.jsonl").write_text('{"text": "good"}\n{"bad\n')
    run = lambda *flags: command(ANALYZE, f"--text={tmp_path}/t", f"--out={tmp_path}/o", *FLAGS, "--metric=", *flags)
    for k in (1, 2, 3):
        ok(run("--skip_bad=1", "--stage=map", f"--part={k}/3"))
    refused(run("--skip_bad=1", "--stage=reduce"), "3 malformed lines were skipped in all parts", "--skip_bad=N")
    assert "malformed lines skipped: 3" in ok(run("--skip_bad=3", "--stage=reduce"))


def test_zlib_parts_of_two_tokenizers_are_not_joined(texts, tmp_path):
    folder = shutil.copytree(texts[0].parent / "whole", tmp_path / "s")
    flags = [ANALYZE, f"--data={folder}", "--block_size=16", "--metric=zlib"]
    ok(command(*flags, "--stage=map", "--part=1/2"))
    (folder / "tokenizer.json").write_text('{"kind": "bytes", "other": 1}')
    ok(command(*flags, "--stage=map", "--part=2/2"))
    refused(command(*flags, "--stage=reduce"), "part 1 is of other data or settings")
