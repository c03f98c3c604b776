"""hf.py: GPT-2 in transformers' layout computes the same in ours, trains on, and goes back. transformers is for the tests only."""
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import OFF, ROOT, command, make_store, ok, refused, train

import hf
from model import BERT, GPT, ViT

transformers = pytest.importorskip("transformers")
T, V = 64, 257
RUN = ["--device=cpu", "--global_batch=8", "--batch_size=4", "--eval_samples=8", "--eval_interval=1000", "--max_new_tokens=2", "--seed=1", "--train_tokens=4000", "--learning_rate=1e-3"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A small GPT-2 with biases that are not zero, saved by transformers."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=V, n_positions=T, n_embd=32, n_layer=4, n_head=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * .3)
    folder = tmp_path_factory.mktemp("hf") / "gpt2"
    model.save_pretrained(folder)
    return model, folder


def logits(ours, tokens):
    """(B, T, V): ours gives the last position's, so of every prefix."""
    return torch.stack([ours(tokens[:, :t + 1]) for t in range(tokens.size(1))], 1)


@torch.no_grad()
def test_logits_equal_those_of_transformers_and_a_shorter_context_takes_the_first_positions(theirs):
    """1e-4 of logits of several units: float32 sums in another order."""
    model, folder = theirs
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, V, (3, 40)))
    for block_size in (T, 40):
        ours = GPT(V, block_size, 4, 2, 32, bias=True, gelu="tanh").eval()
        hf.load(folder, ours)
        assert (logits(ours, tokens) - model(tokens).logits).abs().max() < 1e-4
        assert (logits(GPT(V, T, 4, 2, 32, bias=True).eval(), tokens) - model(tokens).logits).abs().max() > 1       # another model's differ


def test_a_run_starts_from_it_resumes_and_goes_back_to_transformers(theirs, store, tmp_path):
    """Validation at step 0 is transformers' own loss; the exported weights after training give our loss there, too."""
    model, folder = theirs
    copy = shutil.copytree(folder, tmp_path / "copy")
    flags = [*RUN, *OFF, f"--data={store}", f"--out={tmp_path}/run", f"--init_from={copy}"]
    ok(train(*flags, "--stop_step=3"))
    shutil.rmtree(copy)                                                     # a resume reads its checkpoint only
    ok(train("--resume", f"--out={tmp_path}/run"))
    ok(train("--resume", f"--out={tmp_path}/run", f"--export=hf:{tmp_path}/back"))
    val = np.fromfile(store / "val.bin", np.uint16).astype(np.int64)
    windows = torch.from_numpy(np.stack([val[i * T:i * T + T + 1] for i in np.arange(8) * ((len(val) - 1) // T) // 8]))

    @torch.no_grad()
    def loss(m):
        out = m(windows[:, :-1]).logits
        return torch.nn.functional.cross_entropy(out.reshape(-1, V), windows[:, 1:].reshape(-1)).item()
    val_losses = [r["val_loss"] for r in map(json.loads, open(tmp_path / "run" / "log.jsonl")) if "val_loss" in r]
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back").eval()
    assert val_losses[0] == pytest.approx(loss(model), abs=1e-4) and val_losses[-1] == pytest.approx(loss(back), abs=1e-4)
    assert val_losses[-1] < val_losses[0] - .3


def test_export_of_what_was_read_is_what_was_read(theirs, tmp_path):
    model, folder = theirs
    ours = GPT(V, T, 4, 2, 32, bias=True, gelu="tanh")
    hf.load(folder, ours)
    hf.save(ours, dict(hf.read_config(folder)), tmp_path / "back")
    from safetensors.torch import load_file
    a, b = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "back"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_what_is_no_gpt2_is_refused_in_one_line(theirs, store, tmp_path):
    model, folder = theirs
    flags = [*RUN, *OFF, f"--data={store}", f"--out={tmp_path}/run"]
    refused(train(*flags, f"--init_from={tmp_path}"), "config.json")
    refused(train(*flags, f"--init_from={folder}", "--n_layer=6"), "--n_layer")
    refused(train(*flags, f"--init_from={folder}", "--model=gpt2"), "--model")
    for change, words in (({"activation_function": "relu"}, ["relu", "gelu_new"]), ({"model_type": "llama"}, ["llama"]), ({"layer_norm_epsilon": 1e-6}, ["1e-06", "1e-05"])):
        bad = shutil.copytree(folder, tmp_path / str(change))
        (bad / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
        refused(train(*flags, f"--init_from={bad}"), *words)
    refused(train(*flags, f"--init_from={folder}", "--n_expert=4"), "--n_expert")
    other = make_store(tmp_path / "other", np.arange(2000) % 300, vocab=300)
    (other / "val.bin").write_bytes((other / "train.bin").read_bytes())
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"tokens": {"train": 2000, "val": 2000}}))
    refused(train(*flags[:-2], f"--data={other}", f"--out={tmp_path}/run", f"--init_from={folder}"), "wte.weight", "--tokenizer=gpt2")
    bad = shutil.copytree(folder, tmp_path / "empty", ignore=lambda *_: ["model.safetensors"])
    refused(train(*flags, f"--init_from={bad}"), "safetensors")
    ok(train(*flags, "--n_layer=4", "--n_embd=32", "--n_head=2", "--block_size=64", "--stop_step=1"))
    refused(train("--resume", f"--out={tmp_path}/run", f"--export=hf:{tmp_path}/x"), "--gelu=tanh")
    assert not (tmp_path / "x").exists()


def shaken(model):
    """No weight at its initial value, so that a forgotten one shows."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * .3)
    return model.eval()


BERT_RUN = [flag for flag in RUN if "max_new" not in flag]
BERT_CONFIG = dict(vocab_size=50, max_position_embeddings=24, num_hidden_layers=4, hidden_size=32, num_attention_heads=2, intermediate_size=128, num_labels=3)


@pytest.mark.parametrize("name,n_labels,nsp", [("BertForMaskedLM", 0, False), ("BertForPreTraining", 0, True), ("BertForSequenceClassification", 3, False)])
@torch.no_grad()
def test_bert_equals_transformers_with_padding_and_segments_and_goes_back(name, n_labels, nsp, tmp_path):
    """1e-4 of logits of several units: float32 sums in another order."""
    torch.manual_seed(0)
    theirs = shaken(getattr(transformers, name)(transformers.BertConfig(**BERT_CONFIG)))
    theirs.save_pretrained(tmp_path / "a")
    flags = hf.read_config(tmp_path / "a")
    ours = BERT(50, 24, 4, 2, 32, bias=True, norm="post", n_labels=n_labels, nsp=nsp).eval()
    hf.load(tmp_path / "a", ours, "bert", n_labels)
    ids, real = torch.randint(5, 50, (3, 20)), torch.arange(20) < torch.tensor([[20], [11], [5]])
    segments = (torch.arange(20) >= 4).long().expand(3, 20)
    out = theirs(input_ids=ids, attention_mask=real.long(), token_type_ids=segments)
    want, got = getattr(out, "logits", None) if not nsp else out.prediction_logits, ours(torch.stack((torch.where(real, ids, -1), segments), 2))
    where = torch.ones(3, dtype=bool) if n_labels else real
    assert (got[where] - want[where]).abs().max() < 1e-4 < want.abs().max()
    hf.save(ours, flags | {"nsp": nsp}, tmp_path / "b")
    back = getattr(transformers, name).from_pretrained(tmp_path / "b").state_dict()
    assert all(torch.equal(t, back[k]) for k, t in theirs.state_dict().items())


@torch.no_grad()
def test_vit_equals_transformers_and_goes_back_and_takes_a_larger_image(tmp_path):
    torch.manual_seed(0)
    theirs = shaken(transformers.ViTForImageClassification(transformers.ViTConfig(
        num_hidden_layers=4, hidden_size=32, num_attention_heads=2, intermediate_size=128, image_size=12, patch_size=4, num_labels=7)))
    theirs.save_pretrained(tmp_path / "a")
    flags = hf.read_config(tmp_path / "a")
    assert (flags["image_size"], flags["block_size"], flags["arch"]) == (12, 10, "vit")
    ours, pictures = ViT(7, 12, 4, 4, 2, 32, bias=True).eval(), torch.randn(3, 3, 12, 12)
    hf.load(tmp_path / "a", ours, "vit", 7)
    want = theirs(pictures).logits
    assert (ours(pictures) - want).abs().max() < 1e-4 < want.abs().max()
    hf.save(ours, flags, tmp_path / "b")
    back = transformers.ViTForImageClassification.from_pretrained(tmp_path / "b").state_dict()
    assert all(torch.equal(t, back[k]) for k, t in theirs.state_dict().items())
    large = ViT(5, 24, 4, 4, 2, 32, bias=True).eval()           # positions on a finer grid; another number of classes: a new head
    hf.load(tmp_path / "a", large, "vit", 5)
    grid, old = large.wpe.weight[1:].view(6, 6, 32), ours.wpe.weight[1:].view(3, 3, 32)
    assert torch.equal(large.wpe.weight[0], ours.wpe.weight[0]) and torch.equal(large.patch.weight, ours.patch.weight)
    assert (grid.mean((0, 1)) - old.mean((0, 1))).abs().max() < .2 and large(torch.zeros(1, 3, 24, 24)).shape == (1, 5)


def test_a_bert_of_ours_goes_on_as_a_classifier_from_its_checkpoint(store, tmp_path):
    """Pretrained here, exported, fine-tuned: the body is what was trained, the head is new, and a line says so."""
    ok(train(*BERT_RUN, "--pool=off", "--seqlen=off", "--ltd=off", "--arch=bert", "--n_layer=4", "--n_head=2", "--n_embd=32", f"--block_size={T}", f"--data={store}", f"--out={tmp_path}/a"))
    ok(train("--resume", f"--out={tmp_path}/a", f"--export={tmp_path}/m.pt"))
    rows = [(w, len(w) % 2) for w in ("abc", "ab", "abcd", "a", "abcde") * 8]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": w, "label": k}) + "\n" for w, k in rows))
    ok(command(ROOT / "data_analyze.py", "--task=classify", f"--text={tmp_path}/d.jsonl", "--val_fraction=0.2", f"--tokenizer={store}/tokenizer.json", f"--out={tmp_path}/ds"))
    said = ok(train(*BERT_RUN, "--ltd=off", f"--init_from={tmp_path}/m.pt", f"--data={tmp_path}/ds", f"--out={tmp_path}/b", "--learning_rate=0", "--min_lr=0", "--stop_step=1"))
    assert "not in it, so drawn: pooler.weight, pooler.bias, head.weight, head.bias" in said
    a, b = (torch.load(next((tmp_path / name).glob("ckpt*.pt")))["model"] for name in "ab")
    assert all(torch.equal(t, b[k]) for k, t in a.items() if k.startswith(("blocks", "wte", "wpe", "wse", "ln"))) and b["head.weight"].shape == (2, 32)
    refused(train(*BERT_RUN, "--ltd=off", f"--init_from={tmp_path}/d.jsonl.pt", f"--data={tmp_path}/ds", f"--out={tmp_path}/c"), "no checkpoint", "--export=model.pt")
