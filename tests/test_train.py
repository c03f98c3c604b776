"""train.py as its users run it: golden losses, exact resume, kills, ranks, refusals. Each test is real processes."""
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ENV, OFF, ON, ROOT, TINY, command, joined, ok, refused, trace, train

import data
import difficulty
from flags import parse_flags
from model import GPT

BUDGET = "--train_tokens=6000"      # 12 plain steps of 8 x 64, 20 with the techniques on


def weights(out):
    path = sorted(Path(out).glob("ckpt_*.pt"))[-1]
    return torch.load(path)["model"]        # the default load: plain types only (R06)


def same_weights(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -----------------------------------------------------------------------------
# the same numbers as a plain trainer


def some_of(rng, n, m):
    """m different numbers below n: of a permutation where n is small, else drawn until there are enough."""
    if 4 * m > n:
        return rng.permutation(n)[:m].tolist()
    found = []
    while len(found) < m:
        found += rng.integers(0, n, m - len(found)).tolist()
        found = list(dict.fromkeys(found))
    return found


def plain_losses(store, steps, lr=1e-3):
    """A GPT trainer without a trace of the techniques, in twenty lines."""
    torch.manual_seed(1)
    (meta, _), T, B = data.read_meta(store), 64, 8
    tokens = np.fromfile(store / "train.bin", meta["dtype"]).astype(np.int64)
    model = GPT(meta["vocab_size"], T, 4, 2, 32)
    groups = [dict(params=[p for p in model.parameters() if (p.dim() > 1) == matrix], weight_decay=wd) for matrix, wd in ((True, .1), (False, 0.0))]
    optimizer, losses = torch.optim.AdamW(groups, lr=lr, betas=(.9, .95), fused=True), []
    n = (len(tokens) - 1) // T
    order, rng, rest = [], np.random.default_rng(1), list(range(n))
    for step in range(steps):
        while len(order) < B:       # without replacement
            j = some_of(rng, len(rest), min(B, len(rest)))
            order += [rest[i] for i in j]
            m = len(rest) - len(j)
            survivors = [rest[i] for i in range(m, len(rest)) if i not in set(j)]
            for hole, s in zip([i for i in j if i < m], survivors):
                rest[hole] = s
            rest = rest[:m] or list(range(n))
        rows = torch.tensor(np.stack([tokens[i * T:i * T + T + 1] for i in order[:B]]))
        order, total = order[B:], torch.zeros(())
        for part in (rows[:4], rows[4:]):
            loss = model(part[:, :-1], part[:, 1:])
            (loss * (1 / (B * T))).backward()
            total += loss.detach()
        norm = torch.nn.utils.get_total_norm([p.grad for g in groups for p in g["params"]]).item()
        if norm > 1:
            torch._foreach_mul_([p.grad for g in groups for p in g["params"]], 1 / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total) / (B * T))
    return losses


def run_traced(store, tmp_path, name, *flags, **kw):
    ok(train(*TINY, f"--data={store}", f"--out={tmp_path}/{name}", f"--trace={tmp_path}/{name}.jsonl", *flags, **kw))
    return trace(tmp_path / f"{name}.jsonl")


PLAIN = [*OFF, "--train_tokens=10240", "--learning_rate=1e-3", "--warmup_tokens=0", "--lr_decay=constant"]


def test_with_everything_off_training_is_bit_identical_to_a_plain_trainer(store, tmp_path):
    got = run_traced(store, tmp_path, "off", *PLAIN)
    assert [got[t, 0]["loss"] for t in range(20)] == plain_losses(store, 20)


def test_losses_are_the_golden_ones(store, tmp_path):
    """tests/losses.txt: 20 steps plain, 20 with everything on. Bit-identical on the machine kind that its first line
    names; elsewhere the kernels sum in another order, and 1e-3 is what 20 steps make of that."""
    file = ROOT / "tests" / "losses.txt"
    cpu = dict(re.findall(r"^(vendor_id|cpu family|model)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
    key = f"torch {torch.__version__.split('+')[0]} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {' '.join(cpu.values())}"
    runs = {"plain": run_traced(store, tmp_path, "plain", *PLAIN), "all on": run_traced(store, tmp_path, "on", *ON, "--train_tokens=8000", "--pos=rotary", "--dropout=0.1", "--learning_rate=2e-3")}
    got = {name: [r[t, 0]["loss"] for t in range(20)] for name, r in runs.items()}
    if os.environ.get("WRITE_GOLDEN"):
        file.write_text(key + "\n" + "".join(f"{name}: {' '.join(map(repr, losses))}\n" for name, losses in got.items()))
    first, *lines = file.read_text().splitlines()
    for line in lines:
        name, _, losses = line.partition(": ")
        want = [float(x) for x in losses.split()]
        assert len(want) == 20
        if first == key:
            assert got[name] == want
        else:
            assert got[name] == pytest.approx(want, rel=1e-3)


# -----------------------------------------------------------------------------
# resume


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """One uninterrupted run with dropout, all techniques, and more draws than there are samples (several epochs)."""
    folder = tmp_path_factory.mktemp("whole")
    flags = [*TINY, *ON, "--dropout=0.1", "--train_tokens=60000", f"--data={store}"]
    ok(train(*flags, f"--out={folder}/run", f"--trace={folder}/run.jsonl"))
    records = trace(folder / "run.jsonl")
    drawn = sum(len(r["sample_ids"]) for r in records.values())
    assert drawn > 2 * data.Store(store, "train", 64).n_samples, "the run must cross an epoch's end"
    return folder / "run", records, flags


def test_stop_and_resume_joins_into_the_same_trace_and_weights(whole, tmp_path):
    """R01, R02, R04, C08, W02: bit for bit, with dropout, curriculum and LTD, across epochs; nothing but --resume is repeated."""
    out, want, flags = whole
    t = [f"--trace={tmp_path}/t.jsonl"]
    ok(train(*flags, f"--out={tmp_path}/run", *t, "--stop_step=37"))
    assert max(trace(tmp_path / "t.jsonl"))[0] == 36
    ok(train("--resume", f"--out={tmp_path}/run", *t, "--stop_step=90"))
    ok(train("--resume", f"--out={tmp_path}/run", *t))
    assert trace(tmp_path / "t.jsonl") == want and same_weights(out, tmp_path / "run")


def start(flags, out, t):
    return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *flags, f"--out={out}", f"--trace={t}", "--save_interval=5", "--resume"],
                            cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_killed_run_resumes_exactly_wherever_it_was_killed(whole, tmp_path):
    """SIGKILL at several moments of the run and in the middle of a save (while the temporary file of a checkpoint
    stands there), each time resumed: the joined trace and the final weights equal the undisturbed run's."""
    out, want, flags = whole
    run, t = tmp_path / "run", tmp_path / "t.jsonl"
    saves = 0
    for attempt in range(5):
        p, steps0 = start(flags, run, t), len(trace(t)) if t.exists() else 0
        deadline = time.time() + 90
        while p.poll() is None and time.time() < deadline:
            saving = bool(list(run.glob("ckpt_*.tmp"))) and t.exists() and len(t.read_text().splitlines()) > steps0 + 12
            if (attempt % 2 == 0 and saving) or (attempt % 2 and t.exists() and len(t.read_text().splitlines()) > steps0 + 7 + 5 * attempt):
                saves += saving
                break
            time.sleep(0.0005)
        p.kill()
        p.wait()
    assert saves >= 1, "no kill fell into a save"
    ok(train("--resume", f"--out={run}", f"--trace={t}"))
    assert not list(run.glob("*.tmp"))
    assert trace(t) == want and same_weights(out, run)


def test_a_resume_may_change_the_number_of_ranks(whole, tmp_path):
    """1 -> 2 -> 1 ranks: the same samples and the same kept tokens; losses within 1e-5 (sums of two halves)."""
    out, want, flags = whole
    t = tmp_path / "t.jsonl"
    for ranks, stop in ((1, 30), (2, 75), (1, 0)):
        ok(train(*flags, "--resume", f"--out={tmp_path}/run", f"--trace={t}", f"--stop_step={stop}", ranks=ranks))
    records = trace(t)
    got, want = joined({k: v for k, v in records.items() if k[1] == 0 or 30 <= k[0] < 75}), joined(want)
    assert got.keys() == want.keys()
    for step in want:
        assert got[step][:2] == want[step][:2] and got[step][3:] == want[step][3:]
        assert got[step][2] == pytest.approx(want[step][2], abs=1e-5)


def test_sigterm_saves_and_ends_with_code_0(whole, tmp_path):
    out, want, flags = whole
    t = tmp_path / "t.jsonl"
    p = start([*flags, "--save_interval=1000"], tmp_path / "run", t)
    while p.poll() is None and not (t.exists() and len(t.read_text().splitlines()) > 20):
        time.sleep(.01)
    p.send_signal(signal.SIGTERM)
    assert p.wait(60) == 0
    ok(train("--resume", f"--out={tmp_path}/run", f"--trace={t}"))
    assert trace(t) == want and same_weights(out, tmp_path / "run")


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(whole, tmp_path):
    out, want, flags = whole
    ok(train(*flags, f"--out={tmp_path}/run", "--save_interval=10", "--stop_step=30", "--keep_ckpts=3"))
    newest = sorted((tmp_path / "run").glob("ckpt_*.pt"))[-1]
    os.truncate(newest, 1000)
    printed = ok(train("--resume", f"--out={tmp_path}/run"))
    assert f"{newest.name} does not open" in printed and "at step 20" in printed and same_weights(out, tmp_path / "run")


def test_a_resume_with_other_settings_is_refused_by_name(whole, store, tmp_path):
    out = whole[0]
    refused(train("--resume", f"--out={out}", "--learning_rate=1e-4"), "--learning_rate=0.0001", "0.004")
    refused(train(f"--out={out}", f"--data={store}", *TINY), "--resume", "--overwrite")


def test_checkpoints_hold_clean_keys_and_move_between_ranks_and_compile(store, tmp_path):
    """R05: no `module.` or `_orig_mod.`, saved by two ranks, read by one. (A compiled model is compiled in place.)"""
    ok(train(*TINY, *ON, BUDGET, f"--data={store}", f"--out={tmp_path}/run", "--stop_step=4", ranks=2))
    keys = weights(tmp_path / "run").keys()
    assert keys == GPT(257, 64, 4, 2, 32).state_dict().keys()
    model = GPT(257, 64, 4, 2, 32)
    model.compile(backend="aot_eager")
    assert model.state_dict().keys() == keys


# -----------------------------------------------------------------------------
# ranks


def test_two_ranks_equal_one_process_and_drop_different_tokens(store, tmp_path):
    """T08, T10, L11: 50 steps, micro-batches of unequal size, evaluation and saves on the way; losses within 1e-5."""
    flags = [*ON, "--train_tokens=20000", "--global_batch=8", "--batch_size=3", "--eval_interval=7", "--save_interval=9"]
    one, two = run_traced(store, tmp_path, "one", *flags), run_traced(store, tmp_path, "two", *flags, ranks=2)
    a, b = joined(one), joined(two)
    assert len(a) >= 50 and a.keys() == b.keys()
    for step in a:
        assert a[step][:2] == b[step][:2] and abs(a[step][2] - b[step][2]) <= 1e-5, (step, a[step][2], b[step][2])
    dropped = [s for s in a if two[s, 0]["ltd_hash"][0]]
    assert len(dropped) > 10
    assert all(set(two[s, 0]["ltd_hash"]).isdisjoint(two[s, 1]["ltd_hash"]) for s in dropped)
    assert all(set(two[s, 0]["sample_ids"]).isdisjoint(two[s, 1]["sample_ids"]) for s in list(a)[:20])
    val = [[r["val_loss"] for r in map(json.loads, open(tmp_path / n / "log.jsonl")) if "val_loss" in r] for n in ("one", "two")]
    assert val[0] == pytest.approx(val[1], abs=1e-5) and len(val[0]) > 5


def test_one_failing_rank_ends_all_and_shows_its_error(store, tmp_path):
    """N06: rank 1 meets a store without its files (its own disk); everything ends within 60 s with the file's name."""
    shutil.copytree(store, tmp_path / "broken")
    os.truncate(tmp_path / "broken" / "train.bin", 10)
    (tmp_path / "go.py").write_text(f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[1:] += ['--data=' + ({str(store)!r} if os.environ['RANK'] == '0' else {str(tmp_path / 'broken')!r})];"
                                    "import flags, train; flags.run_command(train.main)")
    t0 = time.time()
    p = command("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tmp_path / "go.py", *TINY, BUDGET, f"--out={tmp_path}/run", timeout=100)
    assert p.returncode != 0 and time.time() - t0 < 60
    assert "[rank 1] error:" in p.stderr and str(tmp_path / "broken" / "train.bin") in p.stderr


# -----------------------------------------------------------------------------
# the rest of the program


def test_micro_batches_of_any_size_give_the_same_losses(store, tmp_path):
    """L11, T11: 8 rows as 8, 3 + 3 + 2, or one by one."""
    a, *others = [run_traced(store, tmp_path, f"b{b}", *ON, BUDGET, f"--batch_size={b}") for b in (8, 3, 1)]
    for other in others:
        assert all(abs(a[k]["loss"] - other[k]["loss"]) < 1e-5 and a[k]["sample_ids"] == other[k]["sample_ids"] for k in a)


def test_validation_loss_does_not_depend_on_the_batch_size(store, tmp_path):
    """T07: fixed windows, fixed count."""
    losses = []
    for b in (1, 3, 8):
        ok(train(*TINY, *OFF, f"--data={store}", f"--out={tmp_path}/{b}", "--train_tokens=512", f"--batch_size={b}"))
        losses.append(json.loads((tmp_path / str(b) / "log.jsonl").read_text().splitlines()[1])["val_loss"])
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains_on_a_cpu(store, tmp_path, dtype):
    """T04: fp16 with dynamic loss scaling; losses near float32's (20 steps of 8-bit or 11-bit mantissas)."""
    a, b = (run_traced(store, tmp_path, d, *ON, BUDGET, f"--dtype={d}") for d in ("float32", dtype))
    assert max(abs(a[k]["loss"] - b[k]["loss"]) for k in a) < 5e-2
    assert weights(tmp_path / dtype)["wte.weight"].dtype == torch.float32


def test_reshape_trains_on_every_token(store, tmp_path):
    records = run_traced(store, tmp_path, "r", "--pool=off", "--ltd=off", "--seqlen=reshape:24..64:50%", BUDGET)
    assert records[0, 0]["tokens_seen"] == 512 and records[0, 0]["layer_tokens"] == 8 * 3 * 24
    assert all(np.isfinite(r["loss"]) for r in records.values())


def test_infinite_gradients_are_skipped_counted_and_end_the_run_after_ten(store, tmp_path):
    """T05: an absurd learning rate. The checkpoint that is named and kept is the last whose own gradient was finite; those
    behind it, of ruined weights, are gone."""
    p = train(*TINY, *OFF, f"--data={store}", f"--out={tmp_path}/run", "--train_tokens=100000", "--learning_rate=50", "--grad_clip=0", "--warmup_tokens=0", "--save_interval=1")
    assert p.returncode == 1 and "Traceback" not in p.stderr
    newest = sorted((tmp_path / "run").glob("ckpt_*.pt"))[-1]
    assert "10 steps in a row" in p.stderr and "learning_rate" in p.stderr and str(newest) in p.stderr
    skipped = [json.loads(line).get("skipped", 0) for line in open(tmp_path / "run" / "log.jsonl")]
    assert max(skipped) == 9        # the tenth ends the run before its line
    assert all(t.isfinite().all() for t in weights(tmp_path / "run").values())
    ok(train("--resume", f"--out={tmp_path}/run", f"--stop_step={int(newest.stem[5:]) + 1}"))
    assert json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-2])["skipped"] == 0


def test_two_ranks_build_the_embedded_corpus_once_and_train_on_it(tmp_path):
    """N08: one rank builds, outside of any process group, so that no collective waits for it; the other waits for the last
    file. Everything is made in the current folder; a second start, and another block size, build no tokens again."""
    flags = [f for f in TINY if "block_size" not in f] + ["--block_size=128", "--train_tokens=4000", "--stop_step=2", "--dist_timeout=100"]
    printed = ok(train(*flags, "--out=a", ranks=2, cwd=tmp_path))
    assert printed.count("making the embedded corpus") == 1 and printed.count("training a BPE") == 1
    stamp = (tmp_path / "data" / "stdlib" / "train.bin").stat().st_mtime_ns
    assert "making" not in ok(train(*flags, "--out=b", cwd=tmp_path))
    printed = ok(train(*flags[:-4], "--block_size=64", "--train_tokens=4000", "--stop_step=2", "--out=c", cwd=tmp_path))
    assert "--block_size=64" in printed and "training a BPE" not in printed
    assert (tmp_path / "data" / "stdlib" / "train.bin").stat().st_mtime_ns == stamp


def test_every_rank_must_see_the_same_run(whole, store, tmp_path):
    """N06: rank 1 on a disk of its own finds no checkpoint where rank 0 found one: refused on all ranks, in seconds."""
    out, want, flags = whole
    ok(train(*flags, f"--out={tmp_path}/0/run", "--stop_step=5"))
    (tmp_path / "go.py").write_text(f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[1:] += ['--out={tmp_path}/' + os.environ['RANK'] + '/run'];"
                                    "import flags, train; flags.run_command(train.main)")
    p = command("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tmp_path / "go.py", *flags, "--resume", timeout=100)
    assert p.returncode != 0 and "the ranks see different runs" in p.stderr and not (tmp_path / "1").exists()


def test_sigterm_to_one_rank_stops_both_at_the_same_step(whole, tmp_path):
    """The signal reaches rank 0 in the middle of its optimizer step, where the loss of that step has been exchanged already."""
    out, want, flags = whole
    (tmp_path / "go.py").write_text(f"""import os, signal, sys; sys.path.insert(0, {str(ROOT)!r})
import torch, flags, train
step, count = torch.optim.AdamW.step, []
def signalled(self, *a, **kw):
    count.append(1)
    if os.environ['RANK'] == '0' and len(count) == 7: os.kill(os.getpid(), signal.SIGTERM)
    return step(self, *a, **kw)
torch.optim.AdamW.step = signalled
flags.run_command(train.main)
""")
    ok(command("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tmp_path / "go.py", *flags, f"--out={tmp_path}/run", timeout=100))
    assert [p.name for p in (tmp_path / "run").glob("ckpt_*.pt")] == ["ckpt_0000008.pt"]       # it is told with the next step's message


def test_stop_step_already_passed_ends_at_once(whole, tmp_path):
    out, want, flags = whole
    ok(train(*flags, f"--out={tmp_path}/run", "--stop_step=6"))
    before = (tmp_path / "run" / "ckpt_0000006.pt").read_bytes()
    assert "steps: 6 of" in ok(train("--resume", f"--out={tmp_path}/run", "--stop_step=6"))
    assert (tmp_path / "run" / "ckpt_0000006.pt").read_bytes() == before


def test_a_resume_on_other_data_is_refused(whole, store, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(store, other)
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"fingerprint": "0" * 12}))
    refused(train("--resume", f"--out={whole[0]}", f"--data={other}"), "000000000000", meta["fingerprint"])


def test_overwrite_deletes_a_run_and_nothing_else(store, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    run = [*TINY, *OFF, f"--data={store}", f"--out={tmp_path}/run", "--train_tokens=2000"]
    ok(train(*run))
    lines = len((tmp_path / "run" / "log.jsonl").read_text().splitlines())
    ok(train(*run, "--overwrite"))
    assert (tmp_path / "run" / "thesis.txt").exists() and len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == lines


def test_deterministic_runs_and_changes_nothing_on_a_cpu(store, tmp_path):
    """L12: on a CPU two runs are bit-equal with or without it."""
    a, b = run_traced(store, tmp_path, "a", *ON, BUDGET), run_traced(store, tmp_path, "b", *ON, BUDGET, "--deterministic")
    assert a == b


def test_sample_prints_text_from_a_checkpoint(whole):
    a, b = (ok(train("--sample", "--resume", f"--out={whole[0]}", "--max_new_tokens=30")) for _ in range(2))
    assert a == b and len(a) > 10
    assert ok(train("--sample", "--resume", f"--out={whole[0]}", "--max_new_tokens=1", "--prompt=abc")).startswith("abc")
    refused(train("--sample", "--resume", "--out=/nonexistent/run"), "no checkpoint")
    refused(train("--sample"), "--resume")
    refused(train("--resume", "--out=/nonexistent/run"), "no checkpoint to resume")


def test_a_run_leaves_its_log_config_plot_and_closing_block(store, tmp_path):
    printed = ok(train(*TINY, *ON, BUDGET, f"--data={store}", f"--out={tmp_path}/run"))
    block = dict(line.split(": ", 1) for line in printed.split("---\n")[1].strip().splitlines())
    assert {"val_loss", "tokens_sampled", "tokens_with_loss", "layer_tokens", "seconds", "steps", "corpus"} <= block.keys()
    lines = [json.loads(line) for line in open(tmp_path / "run" / "log.jsonl")]
    assert {"config", "git", "torch", "device", "fingerprint"} <= lines[0].keys()
    assert lines[-1]["val_loss"] == pytest.approx(float(block["val_loss"]), abs=1e-4)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["n_layer"] == 4
    assert (tmp_path / "run" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "| lr " in printed and "| pool " in printed and "| keep 16/16" in printed


def test_plan_prints_the_published_steps_without_data(tmp_path):
    printed = ok(train("--plan", "--model=gpt3-1.3b", "--data=elsewhere", "--train_tokens=300e9", "--global_batch=512", "--pool=off", "--seqlen=truncate:80..2048:110000",
                       "--ltd=128..2048:200000", "--warmup_tokens=3e9", "--plot", cwd=tmp_path))
    assert "steps: 377264\n" in printed and "plain_steps: 286103\n" in printed and (tmp_path / "plan.png").exists()


@pytest.mark.parametrize("flags,words", [
    (["--bath_size=4"], ["bath_size", "--batch_size"]), (["batch_size=4"], ["batch_size=4", "--batch_size=4"]), (["--dropout=abc"], ["dropout", "abc"]),
    (["--wandb=maybe"], ["maybe"]), (["--data=/nowhere"], ["/nowhere", "data_analyze.py"]), (["--model=gpt4"], ["gpt4", "gpt3-1.3b"]), (["--device=cuda"], ["--device=cpu"]),
    (["--pool=voc"], ["START..END"]), (["--ltd=70%"], ["25%..100%:70%"]), (["--plot"], ["--plan"]), (["--dtype=int8"], ["float16"]),
    (["--global_batch=0"], ["global_batch"]), (["--n_embd=30", "--n_head=4"], ["n_head"]), (["--block_size=100000"], ["block_size=100000"]),
    (["--train_tokens=1.5"], ["train_tokens"]), (["--train_tokens=inf"], ["train_tokens"]), (["--block_size=0"], ["block_size"]), (["--dropout=1.5"], ["dropout"]),
    (["--eval_samples=-1"], ["eval_samples"]), (["--grad_clip=-1"], ["grad_clip"]), (["--min_lr=1"], ["--min_lr=1", "learning_rate"]), (["--warmup_tokens=nan"], ["warmup_tokens"]),
    (["--trace=/no/dir/x"], ["/no/dir"]), (["--top_k=-1"], ["top_k"]), (["--device=gpu"], ["cuda:N"]), (["--ltd=off", "--ltd_kernel=cuda"], ["no effect"]),
    (["--ltd_kernel=cuda"], ["--ltd_kernel=torch"]), (["--resume", "--overwrite"], ["no effect"]), (["--lr_decay=constant", "--min_lr=0"], ["no effect"]), (["--pool=rarity:1%..100%:40%"], ["rarity.rank.npy", "--metric=FILE.py:rarity"])])
def test_a_users_mistake_gets_one_line_before_anything_is_written(store, tmp_path, flags, words):
    """G01, K08's kind: what is wrong, what is needed, what to type."""
    base = [f for f in TINY if f.partition("=")[0] not in {x.partition("=")[0] for x in flags}]
    refused(train(*base, *([] if "--data=/nowhere" in flags else [f"--data={store}"]), f"--out={tmp_path}/run", *flags), *words)
    assert not (tmp_path / "run").exists()


def test_flags_take_their_fields_types():
    """G02, G03, G04: never the string "false", ints from 1e3, floats from ints, empty defaults can be set."""
    from config import Config
    cfg, given = parse_flags(Config, ["--dropout=0", "--learning_rate=1e-5", "--compile=false", "--train_tokens=1e3", "--resume", "--pool=a:1..2:3", "--pool=b:1..2:3", "--data=x"], "")
    assert (cfg.dropout, cfg.learning_rate, cfg.compile, cfg.train_tokens, cfg.resume, cfg.data) == (0.0, 1e-5, False, 1000, True, "x")
    assert cfg.pool == ["a:1..2:3", "b:1..2:3"] and type(cfg.dropout) is float and type(cfg.train_tokens) is int and "dropout" in given
    cfg, given = parse_flags(Config, ["--data", "some", "--resume", "--train_tokens", "1e3", "--prompt", "two words"], "")
    assert (cfg.data, cfg.resume, cfg.train_tokens, cfg.prompt) == ("some", True, 1000, "two words")
    for flags in (["--train_tokens=1.5"], ["--compile=fals"], ["--n_layer="]):
        with pytest.raises(ValueError):
            parse_flags(Config, flags, "")


def test_help_describes_every_flag():
    printed = ok(train("--help"))
    import dataclasses

    from config import Config
    for f in dataclasses.fields(Config):
        assert f"--{f.name}" in printed
    assert "layer_tokens (compute)" in printed


STUB = '''
import json, os
def init(**kw): open(os.environ["STUB"], "a").write("init\\n"); return Run()
class Settings:
    def __init__(self, **kw): pass
class Run:
    def define_metric(self, *a, **kw): open(os.environ["STUB"], "a").write("define\\n")
    def log(self, record): open(os.environ["STUB"], "a").write("log " + str(record["step"]) + "\\n")
    def finish(self): pass
'''


def test_an_error_of_wandbs_in_mid_run_costs_one_line(store, tmp_path):
    (tmp_path / "wandb.py").write_text(STUB.replace('def log(self, record): open', 'def log(self, record): raise BrokenPipeError("gone"); open'))
    printed = ok(train(*TINY, *OFF, f"--data={store}", f"--out={tmp_path}/run", "--train_tokens=2000", "--wandb", env={"PYTHONPATH": str(tmp_path), "STUB": str(tmp_path / "calls")}))
    assert printed.count("wandb: off (BrokenPipeError") == 1


def test_wandb_is_started_once_on_rank_0(store, tmp_path):
    """W03, W02: a stand-in for the package counts; ours is untouched."""
    (tmp_path / "wandb.py").write_text(STUB)
    ok(train(*TINY, *ON, BUDGET, f"--data={store}", f"--out={tmp_path}/run", "--wandb", ranks=2, env={"PYTHONPATH": str(tmp_path), "STUB": str(tmp_path / "calls")}))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls.count("init") == 1 and "define" in calls and sum(c.startswith("log") for c in calls) > 10


@pytest.mark.parametrize("env", [{}, {"WANDB_API_KEY": "0" * 40, "HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}])
def test_wandb_never_stops_a_run(store, tmp_path, env):
    """W01: no key (offline), and a key without a network: the run goes on and log.jsonl is whole."""
    pytest.importorskip("wandb")
    clean = {"WANDB_MODE": "", "HOME": str(tmp_path), "WANDB_API_KEY": "", **env}
    printed = ok(train(*TINY, *ON, BUDGET, f"--data={store}", f"--out={tmp_path}/run", "--wandb", env=clean))
    assert "wandb: " in printed and sum("val_loss" in line for line in open(tmp_path / "run" / "log.jsonl")) == 2


# -----------------------------------------------------------------------------
# the controls


CONTROLS = {"importance": ["--pool=off", "--seqlen=off", "--ltd=16..64:70%", "--ltd_choice=importance"],
            "ramp": ["--pool=off", "--seqlen=truncate:16..64:40%", "--ltd=16..64:70%", "--batch_ramp"]}


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_resume_exactly_and_equal_one_process_on_two_ranks(store, tmp_path, name):
    """TokenBypass has a state of its own (the running losses), the batch ramp other shares every step. Losses of two ranks to 1e-5."""
    flags = [*TINY, *CONTROLS[name], f"--data={store}", "--train_tokens=8000"]
    ok(train(*flags, f"--out={tmp_path}/one", f"--trace={tmp_path}/one.jsonl"))
    whole = joined(trace(tmp_path / "one.jsonl"))
    ok(train(*flags, f"--out={tmp_path}/cut", f"--trace={tmp_path}/cut.jsonl", "--stop_step=9"))
    ok(train("--resume", f"--out={tmp_path}/cut", f"--trace={tmp_path}/cut.jsonl"))
    assert joined(trace(tmp_path / "cut.jsonl")) == whole
    ok(train(*flags, f"--out={tmp_path}/two", f"--trace={tmp_path}/two.jsonl", ranks=2))
    two = joined(trace(tmp_path / "two.jsonl"))
    assert whole.keys() == two.keys() and (len({len(r[0]) for r in whole.values()}) > 3) == (name == "ramp")
    for t in whole:
        assert whole[t][:2] == two[t][:2] and abs(whole[t][2] - two[t][2]) < 1e-5


def test_a_resume_on_other_difficulties_is_refused(store, tmp_path):
    folder = shutil.copytree(store, tmp_path / "s")
    ok(train(*TINY, *ON, f"--data={folder}", f"--out={tmp_path}/run", "--train_tokens=8000", "--stop_step=4"))
    s = data.Store(folder, "train", 64)
    difficulty.write_column(s, "voc", -np.asarray(s.column("voc")), 0)
    refused(train("--resume", f"--data={folder}", f"--out={tmp_path}/run"), "other difficulties")


def test_the_probe_takes_the_smallest_start_without_a_jump_and_says_what_it_cost(store):
    """A rate at which every start is calm; then a technique that does not exist."""
    flags = [*TINY, *ON[:1], f"--data={store}", "--train_tokens=30000", "--learning_rate=1e-4"]
    printed = ok(train(*flags, "--probe=seqlen"))
    result = json.loads(printed.splitlines()[-1])
    assert result["flag"] == "--seqlen=truncate:3.125%..100%:100%" and 0 < result["share_of_a_run"] < 1 and len(result["tried"]) == 2
    refused(train(*flags, "--probe=rate"), "seqlen, ltd, pool")
