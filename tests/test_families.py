"""BERT and ViT: the same blocks, dropping, masking, augmentation, resume, ranks; labelled texts and image stores."""
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, command, joined, many, ok, refused, trace, train
from test_ltd import keep_of

import curriculum
import data
import difficulty
import glue
import images
import ltd
import tasks
from model import BERT, GPT, Block, ViT, forward_flops

ANALYZE = ROOT / "data_analyze.py"
NO_TEXT = [flag for flag in TINY if "max_new" not in flag]
BERT_TINY = [*NO_TEXT, "--arch=bert", "--pool=off", "--seqlen=off", "--ltd=16..64:70%"]


# -----------------------------------------------------------------------------
# the model


def masked_block(block, x, keep, real):
    """The whole block at full length, in which dropped and padded keys are masked out; written anew, plainly."""
    B, T, C = x.shape
    kept = torch.zeros(B, T, dtype=bool).scatter(1, keep.long(), True)
    seen = kept & real
    seen = torch.where(seen.any(1, True), seen, kept)           # only padding kept: it sees itself

    def attention(h):
        q, k, v = (z.transpose(1, 2) for z in F.linear(h, block.c_attn.weight, block.c_attn.bias).view(B, T, block.n_head, 3, -1).unbind(3))
        score = q @ k.transpose(2, 3) / (C // block.n_head) ** .5
        y = score.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1) @ v
        return block.attn_proj(y.transpose(1, 2).reshape(B, T, C))

    def mlp(h):
        return block.mlp_proj(F.gelu(block.c_fc(h)))
    if block.post:
        x = block.ln_1(x + attention(x))
        return block.ln_2(x + mlp(x)), kept
    x = x + attention(block.ln_1(x))
    return x + mlp(block.ln_2(x)), kept


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("K", [1, 5, 23, 24])
def test_dropping_a_padded_bidirectional_row_equals_masking_dropped_and_padded_keys(norm, K):
    """float64, two orders of summation: 1e-12. The shortest row keeps padding alone for small K: no empty softmax."""
    B, T, C = 4, 24, 32
    torch.manual_seed(0)
    block, x, keep = Block(C, 4, bias=True, causal=False, norm=norm).double(), torch.randn(B, T, C, dtype=torch.float64), keep_of(B, T, K)
    real = torch.arange(T) < torch.tensor([[T], [17], [9], [1]])
    if K < 23:
        assert not (keep[3] == 0).any()
    want, kept = masked_block(block, x, keep, real)
    got = ltd.drop(block, x, keep, None, None, real)
    assert got.isfinite().all() and torch.equal(got[~kept], x[~kept])
    torch.testing.assert_close(got[kept], want[kept], rtol=1e-12, atol=1e-12)


def test_padding_changes_nothing_about_a_row():
    """The loss of a short row is the same alone and padded beside a long one, dropping included: 1e-6 is float32."""
    torch.manual_seed(0)
    model = BERT(50, 32, 4, 2, 32, bias=True)
    ids = torch.randint(5, 50, (2, 32))
    x = torch.stack((torch.where(torch.arange(32) < torch.tensor([[32], [11]]), ids, -1), (torch.arange(32) > 6).long().expand(2, 32)), 2)
    y = torch.where((torch.arange(32) % 3 == 1) & (x[..., 0] >= 0), ids, -1)
    whole, alone = model(x, y), model(x[:1], y[:1]) + model(x[1:, :11], y[1:, :11])
    assert whole.item() == pytest.approx(alone.item(), rel=1e-6)
    keep = torch.arange(11, dtype=torch.int32).expand(2, 2, 11)
    assert model(x[1:], y[1:], keep[1:]).item() == pytest.approx(model(x[1:, :11], y[1:, :11]).item(), rel=1e-6)


def test_dropping_in_a_vit_equals_masking_and_may_drop_the_class_token():
    """Layer by layer against plain masking, where the class token is kept, and where it is dropped: then the layer passes it on as it is."""
    torch.manual_seed(0)
    model, pictures = ViT(7, 16, 4, 4, 2, 32, bias=True).double().eval(), torch.randn(3, 3, 16, 16, dtype=torch.float64)
    keep = ltd.draw(2, 0, torch.arange(3), [1, 2], 17, 8)
    without = (keep[:, :, 0] != 0)
    assert without.any() and not without.all()
    seen, real = [], torch.ones(3, 17, dtype=bool)
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda m, args, out, i=i: seen.append((i, out.shape[1])))
    x, mask = model.embed(pictures)
    assert mask is None and x.shape == (3, 17, 32)
    for i, block in enumerate(model.blocks):
        if i in (1, 2):
            want, kept = masked_block(block, x, keep[:, i - 1], real)
            assert torch.equal(kept[:, 0], ~without[:, i - 1])
            x = torch.where(kept[..., None], want, x)
        else:
            x, _ = masked_block(block, x, torch.arange(17).expand(3, 17), real)
    torch.testing.assert_close(model(pictures, keep=keep), model.head(model.ln_f(x)[:, 0]).float(), rtol=1e-6, atol=1e-6)
    assert [n for i, n in seen if i in (1, 2)] == [8, 8]
    model.train()
    model(pictures, torch.tensor([1, 2, 3]), keep).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_patches_are_the_images_squares_and_other_sizes_are_scaled():
    model = ViT(5, 8, 4, 3, 2, 16, channels=1)
    picture = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    with torch.no_grad():
        x, _ = model.embed(picture)
        square = picture[0, 0, 4:, :4].reshape(-1) / 127.5 - 1          # the third patch, row by row
        torch.testing.assert_close(x[0, 3], model.patch(square) + model.wpe.weight[3])
        assert model(picture.repeat(2, 1, 1, 1).repeat_interleave(2, 2).repeat_interleave(2, 3)).shape == (2, 5)
    with pytest.raises(ValueError, match="--patch_size=5"):
        ViT(5, 8, 5, 3, 2, 16)


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_flops_of_the_families_are_what_torch_counts(family):
    """Matrix products forward; torch's counter takes attention as not causal, which these are. BERT's head sees the masked tokens alone."""
    from torch.utils.flop_counter import FlopCounterMode
    if family == "bert":
        model, x = BERT(97, 64, 4, 4, 32, bias=True), torch.randint(97, (1, 64, 2)).clamp(max=1)
        y = torch.where(torch.arange(64) < 16, 5, -1)[None]
        ends = BERT.ends_flops(32, 64, 97, mask_prob=.25)
    else:
        model, x, y = ViT(10, 16, 2, 4, 4, 32, bias=True), torch.zeros(1, 3, 16, 16), torch.tensor([3])
        ends = ViT.ends_flops(32, 65, 10, 3, 2)
    T = 64 if family == "bert" else 65
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(x, y, ltd.draw(0, 0, torch.arange(1), [1, 2], T, 16))
    assert counter.get_total_flops() == forward_flops(4, 32, ends, T, 16, 2, False)


# -----------------------------------------------------------------------------
# masking


def test_masks_are_15_percent_80_10_10_and_never_special_tokens(documents):
    """Shares of about 20,000 masked tokens within 4 standard deviations; everything follows from (seed, step, place)."""
    task = tasks.Masked(str(documents), 64, "document", seed=3)
    ids, n = np.arange(task.store.n_samples), task.store.lengths
    kinds, again = np.zeros(3), []
    for step in range(20):
        x, y = task.batch(ids, 64, step, 0, "off")
        raw = task.real.rows(ids)[:, :63]
        assert (x[:, 0, 0] == task.cls_id).all() and (x[..., 1] == 0).all()
        for row, label, text, end in zip(x[..., 0].numpy(), y.numpy(), raw, n):
            assert (row[end:] == -1).all() and row[end - 1] == task.sep_id and label[0] == label[end - 1] == -1
            at = label >= 0
            assert at.sum() == max(1, int(.15 * (end - 2) + .5)) and (label[at] == text[np.flatnonzero(at) - 1]).all()
            assert (row[1:end - 1][~at[1:end - 1]] == text[:end - 2][~at[1:end - 1]]).all()
            same, hidden = row[at] == label[at], row[at] == task.mask_id
            kinds += [hidden.sum(), (~hidden & ~same).sum(), same.sum()]
        assert task.targets(ids, 64, None) == (y >= 0).sum()
        again.append(y)
    total = kinds.sum()
    for share, p in zip(kinds / total, (.8, .1 * 255 / 256, .1 + .1 / 256)):
        assert abs(share - p) < 4 * (p * (1 - p) / total) ** .5
    assert not torch.equal(again[0], again[1])
    part, other = task.batch(ids[5:9], 64, 1, 5, "off"), tasks.Masked(str(documents), 64, "document", seed=4)
    assert torch.equal(part[1], again[1][5:9]) and not torch.equal(other.batch(ids, 64, 1, 0, "off")[1], again[1])
    for t in (task, other):
        t.open_val()
    some = np.array([1, 5, 6])                      # in the evaluation a sample's mask is the same for every seed, in any company
    (x, y), (z, w) = task.val_batch(some), other.val_batch(some[1:])
    n = min(x.shape[1], z.shape[1])
    assert torch.equal(x[1:, :n], z[:, :n]) and torch.equal(y[1:, :n], w[:, :n]) and (y >= 0).any(1).all()
    short, y = task.batch(ids, 24, 1, 0, "off")             # cut by a curriculum: ends with [SEP], fewer masks
    assert short.shape[1] == 24 and ((short[..., 0] == task.sep_id).sum(1) == 1).all() and (y >= 0).sum() == task.targets(ids, 24, None)


def test_pairs_are_the_rest_of_the_document_or_another_ones_beginning(documents):
    task = tasks.Masked(str(documents), 64, "document", seed=0, nsp=True)
    ids, alien, seen = np.arange(task.store.n_samples), [], 0
    texts = [task.real.rows([i])[0, :task.real.lengths[i]].tolist() for i in ids]
    for step in range(4):
        x, y = task.batch(ids, 64, step, 0, "off")
        for i, (row, label) in enumerate(zip(x.numpy(), y.numpy())):
            n = task.store.lengths[i]
            tokens = np.where(label > 0, label, row[:, 0])
            tokens[0] = task.cls_id
            first = 1 + int((row[1:, 0] == task.sep_id).argmax())
            a, b = tokens[1:first].tolist(), tokens[first + 1:n - 1].tolist()
            assert row[n - 1, 0] == task.sep_id and (row[n:, 0] == -1).all()
            assert row[:first + 1, 1].max() == 0 and (row[first + 1:n, 1] == 1).all()
            assert a == texts[i][:len(a)] and len(a) + len(b) == min(len(texts[i]), 61)
            if label[0] == 0:
                assert b == texts[i][len(a):len(a) + len(b)]
            else:
                assert any(b == t[:len(b)] for j, t in enumerate(texts) if j != i)
            alien.append(label[0])
            seen += len(b) > 0
    assert abs(np.mean(alien) - .5 * seen / len(alien)) < .08       # four standard deviations; long ones find no partner more often
    model = BERT(task.ends["vocab_size"], 64, 4, 2, 32, nsp=True, bias=True)
    x, y = x[:6], y[:6]
    parts = sum(model(x[i:i + 1], y[i:i + 1]) for i in range(6))
    assert model(x, y).item() == pytest.approx(parts.item(), rel=1e-6)


def run(flags, out, *more, **kw):
    ok(train(*flags, f"--out={out}", f"--trace={out}.jsonl", *more, **kw))
    return joined(trace(f"{out}.jsonl"))


def same_run(a, b, exact=True):
    assert a.keys() == b.keys() and len(a) > 12
    for t in a:
        assert a[t] == b[t] if exact else (a[t][:2], a[t][3:]) == (b[t][:2], b[t][3:]) and abs(a[t][2] - b[t][2]) < 1e-5


def documents_flags(documents):
    return [*BERT_TINY[:-3], "--pool=seqlen_voc:20..64:40%", "--seqlen=truncate:24..64:50%", "--ltd=16..64:60%", "--samples=document", "--nsp",
            f"--data={documents}", "--train_tokens=6000", "--dist_timeout=60"]


def resumes(flags, folder, name):
    """A run, bit for bit the same when it is stopped and resumed."""
    whole = run(flags, folder / name)
    run([*flags, "--stop_step=9"], folder / f"{name}-cut")
    ok(train("--resume", f"--out={folder}/{name}-cut", f"--trace={folder}/{name}-cut.jsonl"))
    same_run(joined(trace(folder / f"{name}-cut.jsonl")), whole)
    return whole


def test_a_bert_over_documents_resumes_exactly(documents, tmp_path):
    """Masking, dropout, pairs, a pool by length, truncation and dropping on."""
    resumes([*documents_flags(documents), "--dropout=0.1"], tmp_path, "bert")


def test_both_families_are_the_same_run_under_every_engine(documents, pictures, tmp_path):
    """Two ranks; ids, kept tokens and rates equal, losses to 1e-5 (another order of sums), those of the evaluation, too."""
    runs = {}
    for name, flags, layouts in (("bert", documents_flags(documents), ("--parallel=zero3 --recompute=block", "--tp=2 --recompute=selective")),
                                 ("vit", [*VIT_TINY, f"--data={pictures}", "--dist_timeout=60"], ("--parallel=ddp", "--parallel=zero3 --recompute=block"))):
        run(flags, tmp_path / name)
        runs |= {f"{name}-{i}": [*flags, f"--out={tmp_path}/{name}-{i}", f"--trace={tmp_path}/{name}-{i}.jsonl", *layout.split()] for i, layout in enumerate(layouts)}
    many(tmp_path, list(runs.values()))
    for other in runs:
        name = other.partition("-")[0]
        same_run(joined(trace(tmp_path / f"{name}.jsonl")), joined(trace(tmp_path / f"{other}.jsonl")), exact=False)
        a, b = ([{k: v for k, v in r.items() if k in ("val_loss", "accuracy")} for r in map(json.loads, open(tmp_path / f / "log.jsonl")) if "val_loss" in r] for f in (name, other))
        assert a == [pytest.approx(r, abs=1e-5) for r in b] and len(a) == 2


# -----------------------------------------------------------------------------
# labelled texts


VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *("##" + c for c in "abcdefghij"), "sep", "[", "]"]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    file = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    file.write_text("\n".join(VOCAB) + "\n")
    return file


def test_wordpiece_encodes_as_bert_does_and_special_spellings_are_text(vocab):
    from tokenizer import Tokenizer, read_vocab
    t = Tokenizer(read_vocab(vocab))
    assert (t.vocab_size, t.eot_id, t.special) == (28, 3, {"cls": 2, "sep": 3, "mask": 4})
    assert [VOCAB[i] for i in t.encode("Bad Z cab")] == ["b", "##a", "##d", "[UNK]", "c", "##a", "##b"]
    assert [VOCAB[i] for i in t.encode("[SEP]")] == ["[", "sep", "]"]
    assert t.decode(t.encode("bad cab")) == "bad cab"


def label_files(folder, n=240):
    """Whether B has an a; as a number, how long A is."""
    r = np.random.default_rng(0)
    folder.mkdir()
    rows = [["".join(r.choice(list("abc"), r.integers(1, 9))) for _ in range(2)] for _ in range(n)]
    for name, part in (("train", rows[:-60]), ("dev", rows[-60:])):
        (folder / f"{name}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + "".join(
            f"{i}\t{' '.join(a)}\t{' '.join(b)}\t{'entailment' if 'a' in b else 'not_entailment'}\n" for i, (a, b) in enumerate(part)))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"left": " ".join(a), "right": " ".join(b), "score": len(a)}) + "\n" for a, b in part))
    return folder


def test_fine_tuning_learns_a_class_from_tsv_and_a_number_from_jsonl(vocab, tmp_path):
    """And its scores are those of the predictions, computed anew; a resume is exact."""
    folder = label_files(tmp_path / "RTE")
    ok(command(ANALYZE, "--task=rte", f"--text={folder}", f"--tokenizer={vocab}", f"--out={tmp_path}/rte"))
    ok(command(ANALYZE, "--task=regress", f"--text={folder}/train.jsonl", f"--text={folder}/dev.jsonl", "--text_key=left", "--pair_key=right", "--label_key=score",
               f"--tokenizer={vocab}", f"--out={tmp_path}/reg"))
    task = tasks.make_task("bert", str(tmp_path / "rte"), 64, "document")
    x, y = task.batch(np.arange(2), 24, 0, 0, "off")
    line = (folder / "train.tsv").read_text().split("\n")[1].split("\t")
    want = ["[CLS]", *line[1].split(), "[SEP]", *line[2].split(), "[SEP]"]
    assert [VOCAB[i] for i in x[0, :, 0] if i >= 0] == want and y[0] == (line[3] != "entailment")
    assert x[0, :len(want), 1].tolist() == [0] * (want.index("[SEP]") + 1) + [1] * (len(want) - want.index("[SEP]") - 1)
    flags = [*NO_TEXT, "--arch=bert", "--ltd=off", "--learning_rate=3e-3", "--eval_samples=0", "--dropout=0.1", "--train_tokens=30000", "--save_interval=40"]
    whole = run([*flags, f"--data={tmp_path}/rte"], tmp_path / "a")
    run([*flags, f"--data={tmp_path}/rte", "--stop_step=50"], tmp_path / "b")
    ok(train("--resume", f"--out={tmp_path}/b", f"--trace={tmp_path}/b.jsonl"))
    same_run(joined(trace(tmp_path / "b.jsonl")), whole)
    last = [r for r in map(json.loads, open(tmp_path / "a" / "log.jsonl")) if "accuracy" in r][-1]
    saved = torch.load(sorted((tmp_path / "a").glob("ckpt*.pt"))[-1])
    model = BERT(**saved["ends"], block_size=64, n_layer=4, n_head=2, n_embd=32, bias=True).eval()
    model.load_state_dict(saved["model"])
    task.open_val()
    with torch.no_grad():
        x, y = task.val_batch(np.arange(task.n_val))
        right = (model(x).argmax(1) == y).float().mean().item()
    assert last["accuracy"] == pytest.approx(right) and right > .8       # half of them by chance
    ok(train(*flags, f"--data={tmp_path}/reg", f"--out={tmp_path}/c"))
    last = [r for r in map(json.loads, open(tmp_path / "c" / "log.jsonl")) if "pearson" in r][-1]
    assert last["pearson"] > .5 and last["spearman"] > .5
    refused(train(*flags[:-1], f"--data={tmp_path}/rte", f"--out={tmp_path}/d", "--arch=gpt"), "--model=bert-base")


def test_glue_metrics_equal_their_definitions():
    r = np.random.default_rng(0)
    mine, true = r.integers(0, 2, 50), r.integers(0, 2, 50)

    class Half(tasks.Scores):
        is_number, judged_by = False, ("accuracy", "f1", "matthews")

    class Number(tasks.Scores):
        is_number, judged_by = True, ("pearson", "spearman")

    class Net:
        def __init__(self, out):
            self.net = lambda x: out[x]
    logits = torch.from_numpy(np.stack((-mine, mine), 1) * 1.0)
    sums = sum(Half().score(Net(logits), torch.arange(i, i + 10), torch.from_numpy(true[i:i + 10]), i, 50) for i in range(0, 50, 10))
    got = Half().metrics(sums, range(50))
    tp, fp, fn = ((mine & true).sum(), (mine & ~true & 1).sum(), (~mine & true & 1).sum())
    assert got["accuracy"] == pytest.approx((mine == true).mean()) and got["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert got["matthews"] == pytest.approx(np.corrcoef(mine, true)[0, 1])
    a, b = r.integers(0, 6, 50), r.integers(0, 6, 50) + .5          # with ties
    sums = sum(Number().score(Net(torch.from_numpy(a[:, None] * 1.0)), torch.arange(i, i + 10), torch.from_numpy(b[i:i + 10]), i, 50) for i in range(0, 50, 10))
    got = Number().metrics(sums, range(50))
    rank = [np.array([(v < x).sum() + ((v == x).sum() + 1) / 2 for x in v]) for v in (a, b)]
    assert got["pearson"] == pytest.approx(np.corrcoef(a, b)[0, 1]) and got["spearman"] == pytest.approx(np.corrcoef(*rank)[0, 1])
    assert got["val_loss"] == pytest.approx(((a - b) ** 2).mean())


def test_labelled_texts_that_do_not_fit_are_refused_by_file_and_line(vocab, tmp_path):
    folder = label_files(tmp_path / "RTE", 70)
    base = [f"--tokenizer={vocab}", f"--out={tmp_path}/o"]
    refused(command(ANALYZE, "--task=rte", f"--text={folder}/train.tsv", *base), "--text=FOLDER", "dev.tsv")
    refused(command(ANALYZE, "--task=nli", f"--text={folder}", *base), "mnli")
    refused(command(ANALYZE, "--task=qnli", f"--text={folder}", *base), "question", "sentence1")
    refused(command(ANALYZE, "--task=rte", f"--text={folder}", f"--out={tmp_path}/o"), "vocab.txt")
    refused(command(ANALYZE, "--task=classify", f"--text={folder}/train.jsonl", *base, "--text_key=left", "--label_key=kind"), "line 1", "kind")
    refused(command(ANALYZE, "--task=regress", f"--text={folder}/train.tsv", *base, "--text_key=sentence1", "--val_fraction=0.5"), "no number")
    refused(command(ANALYZE, "--task=rte", f"--text={folder}", f"--tokenizer={tmp_path}/none.txt", f"--out={tmp_path}/o"), "none.txt", "vocab.txt")
    refused(command(ANALYZE, "--task=rte", f"--text={folder}", f"--tokenizer={vocab}", f"--out={folder}", "--overwrite"), "no part of a store")
    refused(command(ANALYZE, "--task=rte", f"--text={folder}", *base, "--samples=window"), "--samples", "no effect")
    with open(folder / "train.jsonl", "a") as f:
        f.write('{"left": "a", "score": null}\n')
    refused(command(ANALYZE, "--task=classify", f"--text={folder}/train.jsonl", *base, "--text_key=left", "--label_key=score"), "line 11", "label")
    with open(folder / "dev.tsv", "a") as f:                    # GLUE's own files have such lines
        f.write("7\ta\tb\n8\t \t\tentailment\n")
    assert not (tmp_path / "o").exists()
    said = ok(command(ANALYZE, "--task=rte", f"--text={folder}", *base))
    assert "dev.tsv: 1 lines without all their fields skipped" in said and "1 examples without a text skipped (val)" in said
    labels = np.load(tmp_path / "o" / "val.labels.npy")
    np.save(tmp_path / "o" / "val.labels.npy", labels[1:])
    refused(train(*NO_TEXT, "--arch=bert", "--ltd=off", f"--data={tmp_path}/o", f"--out={tmp_path}/r"), "val.labels.npy")
    np.save(tmp_path / "o" / "val.labels.npy", labels)
    refused(train(*NO_TEXT, "--arch=bert", "--ltd=off", f"--data={tmp_path}/o", f"--out={tmp_path}/r", "--nsp"), "--nsp", "labelled")
    assert set(glue.TASKS) >= {"cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"}
    (folder / "cola.tsv").write_text("x\t1\t\tthe first\nx\t0\t*\tthe \"second\n")
    assert glue.examples(folder / "cola.tsv", *glue.TASKS["cola"][1:3]) == ([("the first", "1"), ('the "second', "0")], 0)


def test_of_a_pair_that_does_not_fit_the_longer_text_is_cut_first(vocab, tmp_path):
    for a in range(1, 9):
        for b in range(0, 9):
            for room in range(2, 18):
                x, y = a, b
                while x + y > room:
                    x, y = (x - 1, y) if x > y else (x, y - 1)
                assert tasks.cut_pair(a, b, room) == (x, y)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": "a " * n, "b": "b " * m, "label": i // 2}) + "\n" for i, (n, m) in enumerate([(50, 3), (3, 50), (50, 50), (2, 1)])))
    ok(command(ANALYZE, "--task=classify", f"--text={tmp_path}/d.jsonl", "--pair_key=b", "--val_fraction=0.5", f"--tokenizer={vocab}", f"--out={tmp_path}/ds"))
    task = tasks.make_task("bert", str(tmp_path / "ds"), 16, "document")
    x, y = task.batch(np.array([0, 1]), 16, 0, 0, "off")
    word = lambda row: "".join({"[CLS]": "C", "[SEP]": "S"}.get(VOCAB[i], VOCAB[i]) for i in row if i >= 0)
    assert [word(row) for row in x[..., 0]] == ["C" + "a" * 10 + "SbbbS", "C" + "a" * 7 + "S" + "b" * 6 + "S"] and y.tolist() == [0, 1]
    assert x[0, :, 1].tolist() == [0] * 12 + [1] * 4


# -----------------------------------------------------------------------------
# images


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """400 drawn images of 16 x 16, as an .npz with a validation set."""
    folder = tmp_path_factory.mktemp("images")
    splits, _ = images.drawn(400, 100, 16)
    np.savez(folder / "s.npz", **{f"{a}_{b}": v for b, s in (("train", "train"), ("test", "val")) for a, v in zip("xy", splits[s])})
    ok(command(ANALYZE, f"--images={folder}/s.npz", f"--out={folder}/ds"))
    return folder / "ds"


VIT_TINY = [*TINY[:4], "--global_batch=8", "--batch_size=4", "--eval_interval=1000", "--eval_samples=0", "--save_interval=1000", "--log_interval=1", "--seed=1",
            "--arch=vit", "--image_size=16", "--patch_size=4", "--ltd=4..17:70%", "--ltd_multiple=2", "--train_tokens=3000"]


def test_augmentation_shifts_and_mirrors_and_follows_from_seed_step_and_place():
    x = torch.arange(1, 1 + 64 * 3 * 16 * 16, dtype=torch.int32).view(64, 3, 16, 16)
    got = tasks.augment(x, 0, 5, torch.arange(64))
    padded, kinds = F.pad(x, (2, 2, 2, 2)), set()
    for before, after in zip(padded, got):
        found = [(dy, dx, flip) for dy in range(5) for dx in range(5) for flip in (False, True)
                 if torch.equal(after, (before.flip(2) if flip else before)[:, dy:dy + 16, dx:dx + 16])]
        assert len(found) == 1
        kinds.add(found[0])
    assert len(kinds) > 25                          # of 50
    assert torch.equal(tasks.augment(x[7:9], 0, 5, torch.arange(7, 9)), got[7:9])
    assert not torch.equal(tasks.augment(x, 0, 6, torch.arange(64)), got) and not torch.equal(tasks.augment(x, 1, 5, torch.arange(64)), got)
    assert torch.equal(tasks.augment(x, 0, 5, torch.arange(64), "flip").sum((1, 2, 3)), x.sum((1, 2, 3)))


def test_a_vit_resumes_exactly_with_adamw_and_sgd(pictures, tmp_path):
    """Augmentation, dropout and dropping on, the class token's too."""
    resumes([*VIT_TINY, f"--data={pictures}", "--dropout=0.1"], tmp_path, "adamw")
    resumes([*VIT_TINY, f"--data={pictures}", "--optimizer=sgd", "--learning_rate=0.05", "--lr_decay=constant"], tmp_path, "sgd")


def test_sgd_is_torchs_sgd_by_hand(pictures, tmp_path):
    """Three steps: v = 0.9 v + g, w = w - rate v, with gradients of the summed loss over the batch."""
    flags = [*VIT_TINY[:-3], "--ltd=off", "--augment=none", "--optimizer=sgd", "--learning_rate=0.05", "--lr_decay=constant", "--warmup_tokens=0", "--weight_decay=0", "--grad_clip=0",
             f"--data={pictures}", "--train_tokens=408"]
    ok(train(*flags, f"--out={tmp_path}/r", f"--trace={tmp_path}/r.jsonl"))
    torch.manual_seed(1)
    model, store = ViT(10, 16, 4, n_layer=4, n_head=2, n_embd=32, bias=True), images.ImageStore(pictures, "train")
    speed = [torch.zeros_like(p) for p in model.parameters()]
    for (_, _), r in sorted(trace(tmp_path / "r.jsonl").items()):
        x, y = map(torch.from_numpy, store.rows(np.array(r["sample_ids"])))
        loss = model(x, y) / 8
        assert r["loss"] == pytest.approx(loss.item(), rel=1e-5)         # two micro-batches here, one there
        for p, v, g in zip(model.parameters(), speed, torch.autograd.grad(loss, list(model.parameters()))):
            v.mul_(.9).add_(g)
            p.data.sub_(.05 * v)
    saved = torch.load(next((tmp_path / "r").glob("ckpt*.pt")))["model"]
    for name, p in model.named_parameters():
        torch.testing.assert_close(saved[name], p.detach(), rtol=1e-4, atol=1e-6)


def test_image_stores_of_every_kind_hold_the_same_images(pictures, tmp_path):
    """CIFAR's two layouts, folders of files, and .npz; the first three images are looked at."""
    from PIL import Image
    r = np.random.default_rng(0)
    x, y = r.integers(0, 256, (60, 3, 32, 32), np.uint8), np.arange(60) % 3
    ten, hundred, files = tmp_path / "ten", tmp_path / "hundred", tmp_path / "files"
    for folder in (ten, hundred):
        folder.mkdir()
    pack = lambda a, b, key: pickle.dumps({b"data": a.reshape(len(a), -1), key: b.tolist()}, protocol=2)
    for i in range(5):
        (ten / f"data_batch_{i + 1}").write_bytes(pack(x[10 * i:10 * i + 10], y[10 * i:10 * i + 10], b"labels"))
    (ten / "test_batch").write_bytes(pack(x[50:], y[50:], b"labels"))
    (ten / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"a", b"b", b"c"]}, protocol=2))
    (hundred / "train").write_bytes(pack(x[:50], y[:50], b"fine_labels"))
    (hundred / "test").write_bytes(pack(x[50:], y[50:], b"fine_labels"))
    (hundred / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"a", b"b", b"c"]}, protocol=2))
    for i, (image, label) in enumerate(zip(x, y)):
        folder = files / ("train" if i < 50 else "val") / "abc"[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / f"{i:03}.png")
    found = {}
    for name, more in (("ten", []), ("hundred", []), ("files", ["--image_size=32"])):
        ok(command(ANALYZE, f"--images={tmp_path}/{name}", f"--out={tmp_path}/{name}.store", *more))
        store = found[name] = images.ImageStore(tmp_path / f"{name}.store", "train")
        assert store.meta["classes"] == ["a", "b", "c"] and store.n_samples == 50
    assert found["ten"].meta["fingerprint"] == found["hundred"].meta["fingerprint"]
    assert np.array_equal(found["ten"].rows(np.arange(50))[0], x[:50]) and np.array_equal(found["ten"].labels, y[:50])
    order = np.concatenate([np.flatnonzero(y[:50] == k) for k in range(3)])          # files come class by class
    assert np.array_equal(found["files"].rows(np.arange(50))[0], x[order])
    evil = pickle.dumps({b"data": x[:1], b"labels": [np.random.default_rng]}, protocol=2)
    (ten / "data_batch_3").write_bytes(evil)
    refused(command(ANALYZE, f"--images={ten}", f"--out={tmp_path}/o"), "data_batch_3", "does not belong")
    (files / "train" / "a" / "000.png").write_bytes(b"no image")
    refused(command(ANALYZE, f"--images={files}", f"--out={tmp_path}/o"), "000.png")
    for folder in (".git", "__MACOSX"):                         # are no classes
        (files / "train" / folder).mkdir()
    (ten / "data_batch_3").write_bytes(pickle.dumps([1], protocol=2))
    refused(command(ANALYZE, f"--images={ten}", f"--out={tmp_path}/o"), "data_batch_3")
    (tmp_path / "none.npz").write_bytes(b"x")
    refused(command(ANALYZE, f"--images={tmp_path}/none.npz", f"--out={tmp_path}/o"), "none.npz")
    refused(command(ANALYZE, f"--images={files}", f"--out={files}", "--overwrite"), "no part of a store")
    shutil.rmtree(files / "val")
    shutil.rmtree(files / "train" / "a")
    ok(command(ANALYZE, f"--images={files}", "--image_size=8", "--val_fraction=0.5", f"--out={tmp_path}/two"))
    two = images.ImageStore(tmp_path / "two", "val")
    assert two.meta["classes"] == ["b", "c"] and two.meta["shape"] == [3, 8, 8] and two.n_samples == 16
    shutil.rmtree(files / "train" / "b")
    refused(command(ANALYZE, f"--images={files}", f"--out={tmp_path}/o"), "two classes")
    np.savez(tmp_path / "bad.npz", images=x.astype(np.float32), labels=y)
    refused(command(ANALYZE, f"--images={tmp_path}/bad.npz", f"--out={tmp_path}/o"), "uint8")
    np.savez(tmp_path / "one.npz", images=x[:, 0], labels=y)
    ok(command(ANALYZE, f"--images={tmp_path}/one.npz", "--val_fraction=0.5", f"--out={tmp_path}/one"))
    one = images.ImageStore(tmp_path / "one", "val")
    assert one.meta["shape"] == [1, 32, 32] and one.n_samples == 30 and np.array_equal(one.rows(np.arange(30))[0][:, 0], x[1::2, 0])
    assert not list(tmp_path.glob("o*.tmp")) and not (tmp_path / "o").exists()


def test_difficulties_of_images_order_a_curriculum(pictures, tmp_path):
    """A function of the user's, and the loss under a checkpoint, equal to the model's own."""
    store = shutil.copytree(pictures, tmp_path / "ds")
    (tmp_path / "my.py").write_text("def dark(images, labels):\n    return images.mean((1, 2, 3)) + labels * 0\n")
    ok(command(ANALYZE, f"--data={store}", f"--metric={tmp_path}/my.py:dark"))
    s = images.ImageStore(store, "train")
    assert s.column("dark").tolist() == pytest.approx(s.images.mean((1, 2, 3)).tolist(), rel=1e-12)
    flags = [*VIT_TINY, f"--data={store}", "--pool=dark:30%..100%:50%"]
    got = run(flags, tmp_path / "run")
    easiest = set(np.flatnonzero(curriculum.ranks(s.column("dark")) < 120).tolist())
    assert set(got[0][0]) <= easiest
    path = next((tmp_path / "run").glob("ckpt*.pt"))
    ok(command(ANALYZE, f"--data={store}", "--metric=loss", f"--checkpoint={path}"))
    saved = torch.load(path)
    model = ViT(**saved["ends"], n_layer=4, n_head=2, n_embd=32, bias=True).eval()
    model.load_state_dict(saved["model"])
    with torch.no_grad():
        want = model(*map(torch.from_numpy, s.rows(np.arange(400))), reduction="none")
    assert s.column("loss").tolist() == pytest.approx(want.tolist(), rel=1e-4)
    refused(command(ANALYZE, f"--data={store}", "--metric=voc"), "voc", "FILE.py")
    with pytest.raises(ValueError, match="--metric=seqlen"):
        difficulty.compute(s, "seqlen")


def test_what_the_families_cannot_do_is_refused_by_name(store, pictures, documents, tmp_path):
    out = f"--out={tmp_path}/o"
    for flags, words in (
            ([*VIT_TINY, f"--data={store}"], ["no images", "images"]), ([*TINY, f"--data={pictures}"], ["images", "--model"]),
            ([*VIT_TINY, f"--data={pictures}", "--seqlen=truncate:8..16:40%"], ["--seqlen", "--arch=vit"]),
            ([*VIT_TINY, f"--data={pictures}", "--block_size=17"], ["--block_size", "patches"]),
            ([*VIT_TINY, f"--data={pictures}", "--ltd=4..8:70%", "--patch_size=5"], ["--patch_size=5"]),
            ([*BERT_TINY[:-2], "--seqlen=reshape:16..64:40%", f"--data={store}"], ["reshape", "truncate"]),
            ([*BERT_TINY, "--nsp", f"--data={store}"], ["--nsp", "--samples=document"]),
            ([*BERT_TINY[:-2], "--nsp", f"--data={documents}", "--samples=document", "--seqlen=truncate:2..64:40%", "--seqlen_multiple=1"], ["rows of 2 tokens", "needs 4"]),
            ([*BERT_TINY, "--ltd_choice=importance", f"--data={store}"], ["--ltd_choice", "--arch=bert"]),
            ([*BERT_TINY, "--mask_prob=1.5", f"--data={store}"], ["--mask_prob"]),
            ([*TINY, "--nsp", f"--data={store}"], ["--nsp", "--arch=gpt"]), ([*TINY, "--arch=t5", f"--data={store}"], ["--arch=t5", "bert"]),
            ([*TINY, "--model=bert-base", "--arch=vit", f"--data={store}"], ["--arch=bert"])):
        refused(train(*flags, out), *words)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("family", [GPT, BERT, ViT])
def test_every_family_takes_the_same_blocks(family):
    """One stack: the blocks' parameters have the same names and shapes whatever the ends."""
    model = {GPT: lambda: GPT(50, 16, 4, 2, 32, bias=True), BERT: lambda: BERT(50, 16, 4, 2, 32, bias=True), ViT: lambda: ViT(5, 8, 2, 4, 2, 32, bias=True)}[family]()
    assert {n: p.shape for n, p in model.blocks.named_parameters()} == {n: p.shape for n, p in GPT(9, 4, 4, 2, 32, bias=True).blocks.named_parameters()}
    assert isinstance(model.blocks[0], Block) and data and type(model.blocks[1]) is Block
