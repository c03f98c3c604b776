"""Document samples: one document a row, cut or padded, in data.py, difficulty.py, plan.py and a run."""
import numpy as np
import pytest
from conftest import ROOT, TINY, command, joined, make_store, ok, refused, trace, train, write_jsonl
from test_plan import PLAIN

import data
import difficulty
from plan import make_plan

ANALYZE = ROOT / "data_analyze.py"
LENGTHS = [4, 1, 12, 2, 9, 3]       # with end marks; the one of a single token has no target and is no sample
STREAM = [t for n in LENGTHS for t in [*range(1, n), 0]]


@pytest.fixture
def small(tmp_path):
    return data.Store(make_store(tmp_path / "s", STREAM, vocab=20, lengths=LENGTHS), "train", 8, "document")


def test_a_document_is_one_sample_cut_or_padded_to_the_block(small):
    assert small.n_samples == 5 and small.lengths.tolist() == [3, 8, 1, 8, 2]
    rows = small.rows(np.array([1, 0, 2]))
    assert rows.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 0, -1, -1, -1, -1, -1], [1, 0, -1, -1, -1, -1, -1, -1, -1]]
    x, mask = small.inputs(0, 3)
    assert x.tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8], [1, 0, 0, 0, 0, 0, 0, 0]]
    assert mask.sum(1).tolist() == [3, 8, 1]


def test_a_token_outside_the_vocabulary_is_refused_in_documents_too(tmp_path):
    s = data.Store(make_store(tmp_path, STREAM, vocab=9, lengths=LENGTHS), "train", 8, "document")
    s.rows(np.array([0]))
    with pytest.raises(ValueError, match="vocab_size is 9"):
        s.rows(np.array([1]))


def test_metrics_see_only_what_is_no_padding(small):
    p = np.maximum(np.bincount(STREAM, minlength=20), 1)
    surprise = -np.log(p / p.sum())
    voc = difficulty.compute(small, "voc")
    assert voc.tolist() == pytest.approx([surprise[1:n + 1].sum() for n in (3, 8, 1, 8, 2)], rel=1e-12)
    assert difficulty.compute(small, "seqlen").tolist() == [3, 8, 1, 8, 2]
    both = difficulty.compute(small, "seqlen_voc")
    assert np.floor(both).tolist() == [3, 8, 1, 8, 2] and np.argsort(both, kind="stable").tolist() == np.lexsort((voc, small.lengths)).tolist()


def test_windows_have_no_seqlen(tmp_path):
    with pytest.raises(ValueError, match="--samples=document"):
        difficulty.analyze(make_store(tmp_path, STREAM, vocab=20), 8, ["seqlen"])


def test_a_document_of_65537_bytes_has_that_length_in_the_index(tmp_path):
    """N04: not 1."""
    write_jsonl(tmp_path / "d.jsonl", ["ab", "x" * 65_537, "c"])
    ok(command(ANALYZE, f"--text={tmp_path}/d.jsonl", f"--out={tmp_path}/o", "--tokenizer=bytes", "--val_fraction=0", "--samples=document", "--block_size=70000", "--metric=seqlen,seqlen_voc"))
    s = data.Store(tmp_path / "o", "train", 70_000, "document")
    assert s.column("seqlen").tolist() == [2, 65_537, 1] and s.column("seqlen", ranked=True).tolist() == [1, 2, 0]
    assert np.floor(s.column("seqlen_voc")).tolist() == [2, 65_537, 1]
    refused(command(ANALYZE, f"--data={tmp_path}/o", "--metric=seqlen"), "--samples=document")
    with pytest.raises(ValueError, match=r"T64-documents/voc.npy is missing .*--samples=document"):
        data.Store(tmp_path / "o", "train", 64, "document").column("voc")


def test_documents_of_stores_made_elsewhere_are_found_by_end_marks_or_the_index(tmp_path):
    docs = [np.arange(1, n) for n in (5, 9, 3)]
    ended = np.concatenate([np.append(d, 50256) for d in docs]).astype(np.uint16)
    begun = np.concatenate([np.append(50256, d) for d in docs]).astype(np.uint16)       # the mark in front: llm.c's way
    for name in ("nanogpt", "llmc", "megatron"):
        (tmp_path / name).mkdir()
    ended.tofile(tmp_path / "nanogpt" / "train.bin")
    for i, part in enumerate((begun, begun)):       # two shards: a document ends with its file
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(part)
        (tmp_path / "llmc" / f"x_train_{i}.bin").write_bytes(header.tobytes() + part.tobytes())
    np.concatenate(docs).astype(np.uint16).tofile(tmp_path / "megatron" / "train.bin")  # no mark: only the index knows
    index = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8]) + (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    (tmp_path / "megatron" / "train.idx").write_bytes(index + np.array([4, 8, 2], np.int32).tobytes() + bytes(24))
    with pytest.raises(ValueError, match="says where documents begin; make it with: python data_analyze.py"):
        data.Store(tmp_path / "llmc", "train", 6, "document")
    for name, want in (("nanogpt", [4, 6, 2]), ("llmc", [4, 6, 1] * 2), ("megatron", [3, 6, 1])):
        assert "documents" in ok(command(ANALYZE, f"--data={tmp_path}/{name}", "--samples=document", "--block_size=6", "--metric=seqlen"))
        s = data.Store(tmp_path / name, "train", 6, "document")
        assert s.column("seqlen").tolist() == want == s.lengths.tolist()
        assert s.rows(np.array([0]))[0, :4].tolist() == [1, 2, 3, 4]
    assert data.Store(tmp_path / "llmc", "train", 6, "document").rows(np.array([3, 5])).tolist() == [[1, 2, 3, 4, 50256, -1, -1], [1, 2, -1, -1, -1, -1, -1]]


def test_the_plan_of_documents_is_what_will_be_drawn(documents):
    """Length, tokens and layer-tokens of every step, counted again from the rows themselves."""
    s = data.Store(documents, "train", 64, "document")
    kw = PLAIN | dict(train_tokens=30_000, pool=["seqlen:20..64:40%"], seqlen="truncate:24..64:50%", ltd="16..64:60%", n_layer=4)
    p = make_plan(**kw, store=s)
    for t in range(p.steps):
        rows = s.rows(p.sampler.ids(t))
        longest = (rows[:, 1:] >= 0).sum(1).max()
        cap = int(np.clip(np.floor((24 + 40 * t / (round(.5 * p.plain_steps))) / 8 + 1e-9) * 8, 24, 64))
        assert p.length[t] == min(cap, -(-longest // 8) * 8)
        assert p.tokens[t] == (rows[:, 1:p.length[t] + 1] >= 0).sum()
        assert (rows >= 0).sum(1).max() - 1 <= p.limits["seqlen"][t]
    assert p.spent["layer_tokens"][-1] >= 30_000 > p.spent["layer_tokens"][-2]
    assert p.spent["sampled"][-1] > p.spent["tokens"][-1]
    plain = make_plan(**PLAIN | dict(train_tokens=30_000, n_layer=4), store=s)
    assert plain.steps == plain.plain_steps == p.plain_steps and plain.spent["sampled"][-1] == plain.spent["tokens"][-1] < 30_000
    with pytest.raises(ValueError, match="take truncate"):
        make_plan(**kw | dict(seqlen="reshape:24..64:50%"), store=s)


FLAGS = [*TINY, "--samples=document", "--pool=seqlen:20..64:40%", "--pool=voc:50%..100%:40%", "--seqlen=truncate:24..64:50%", "--ltd=16..64:60%",
         "--train_tokens=12000", "--save_interval=7"]


def test_a_run_over_documents_is_the_same_for_two_ranks_and_after_a_kill(documents, tmp_path):
    """Ids, hashes and rates equal, losses to 1e-5 (another order of sums); resumed in the middle: bit for bit."""
    flags = [*FLAGS, f"--data={documents}"]
    printed = ok(train(*flags, f"--out={tmp_path}/one", f"--trace={tmp_path}/one.jsonl"))
    assert "tokens_cut_off: " in printed
    whole = joined(trace(tmp_path / "one.jsonl"))
    ok(train(*flags, f"--out={tmp_path}/two", f"--trace={tmp_path}/two.jsonl", ranks=2))
    two = joined(trace(tmp_path / "two.jsonl"))
    assert whole.keys() == two.keys() and len(whole) > 15
    for t in whole:
        assert whole[t][:2] == two[t][:2] and whole[t][3:] == two[t][3:] and abs(whole[t][2] - two[t][2]) < 1e-5
    ok(train(*flags, f"--out={tmp_path}/cut", f"--trace={tmp_path}/cut.jsonl", "--stop_step=9"))
    ok(train("--resume", f"--out={tmp_path}/cut", f"--trace={tmp_path}/cut.jsonl"))
    assert joined(trace(tmp_path / "cut.jsonl")) == whole
