"""parallel.py and checkpoint.py: every layout of ranks computes what one process computes, reads what any other wrote, and
survives the loss of a rank, a host, a message, or the disk. Real torchrun, gloo."""
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ENV, OFF, ON, ROOT, TINY, command, joined, many, ok, trace, train

import checkpoint
from config import Config, check, settle
from flags import parse_flags
from model import GPT

# curriculum and token dropping on, clipping at work, more than 20 steps of 4 micro-batches or 2 a rank
RUN = [*TINY, *ON, "--dist_timeout=60", "--train_tokens=9000", "--grad_clip=0.3", "--batch_size=2", "--eval_interval=20"]


def losses(out):
    return {r["step"]: r["val_loss"] for r in map(json.loads, open(out / "log.jsonl")) if "val_loss" in r}


def launch(*words, ranks=2, options=("--standalone",), prefix=(), **kw):
    return subprocess.Popen([*prefix, sys.executable, "-m", "torch.distributed.run", *options, f"--nproc_per_node={ranks}", *map(str, words)], cwd=ROOT, env=ENV | kw.pop("env", {}), text=True, **kw)


@pytest.fixture(scope="module")
def one(store, tmp_path_factory):
    """The same run by one process: trace, validation losses, weights."""
    folder = tmp_path_factory.mktemp("one")
    ok(train(*RUN, f"--data={store}", f"--out={folder}/run", f"--trace={folder}/t.jsonl"))
    weights = torch.load(max((folder / "run").glob("ckpt_*.pt")))["model"]
    return joined(trace(folder / "t.jsonl")), losses(folder / "run"), weights


def equals_one(records, one, tolerance=1e-5):
    """Ids, kept tokens and rates equal; losses to 1e-5 (float32, sums in another order; seen: 5e-7)."""
    assert records.keys() == one[0].keys() and len(records) > 20
    for t, want in one[0].items():
        assert records[t][:2] == want[:2] and records[t][3:] == want[3:], t
        assert abs(records[t][2] - want[2]) < tolerance, (t, records[t][2], want[2])


# LAYOUTS=all in the environment runs all of them, else those in front of the bar
TWO = ["--parallel=ddp --recompute=block", "--parallel=zero1 --offload=disk:DISK", "--parallel=zero2 --ckpt_async --save_interval=4", "--parallel=zero3 --offload=cpu --recompute=block",
       "--tp=2 --recompute=selective --pos=rotary", "--pp=2", "--pp=2 --pp_schedule=interleaved --recompute=selective", "|", "--parallel=zero1", "--parallel=zero2 --recompute=selective", "--parallel=zero3",
       "--offload=disk:DISK", "--tp=2", "--tp=2 --recompute=block", "--pp=2 --pp_schedule=gpipe --recompute=block", "--pp=2 --parallel=zero1 --offload=cpu"]
FOUR = ["--tp=2 --parallel=zero3 --recompute=block", "--pp=2 --parallel=zero2 --pp_schedule=interleaved --batch_size=1", "--tp=2 --pp=2 --recompute=selective", "|", "--tp=2", "--tp=2 --parallel=zero1 --offload=cpu",
        "--tp=2 --parallel=zero2", "--pp=2 --recompute=selective", "--pp=2 --parallel=zero1", "--pp=2 --parallel=zero3 --offload=disk:DISK", "--pp=2 --tp=2 --parallel=zero2", "--parallel=zero3 --recompute=selective",
        "--parallel=zero1", "--parallel=zero2", "--parallel=ddp"]


@pytest.mark.parametrize("ranks,layouts", [(2, TWO), (4, FOUR)])
def test_every_layout_equals_one_process(store, one, tmp_path, ranks, layouts):
    bar = layouts.index("|")
    layouts = layouts[:bar] + (layouts[bar + 1:] if os.environ.get("LAYOUTS") == "all" else [])
    rotary = [x for x in layouts if "rotary" in x]
    runs = [[*RUN, f"--data={store}", f"--out={tmp_path}/{i}", f"--trace={tmp_path}/{i}.jsonl", *flags.replace("DISK", f"{tmp_path}/disk").split()] for i, flags in enumerate(layouts)]
    many(tmp_path, runs, ranks)
    for i, flags in enumerate(layouts):
        if flags in rotary:
            ok(train(*RUN, "--pos=rotary", f"--data={store}", f"--out={tmp_path}/rotary", f"--trace={tmp_path}/rotary.jsonl"))
        want = (joined(trace(tmp_path / "rotary.jsonl")), losses(tmp_path / "rotary")) if flags in rotary else one
        equals_one(joined(trace(tmp_path / f"{i}.jsonl")), want)
        assert losses(tmp_path / str(i)) == pytest.approx(want[1], abs=1e-5)
    assert not (tmp_path / "disk").exists() or not list((tmp_path / "disk").iterdir())       # the files end with the process


def test_half_precision_under_each_engine_stays_near_float32(store, one, tmp_path):
    """Weights travel in half precision under FSDP2. 23 steps of bfloat16, which has 8 bits, end within 1e-2; float16, with 11, within 2e-3."""
    layouts = [("bfloat16", 1e-2, "--parallel=zero3"), ("float16", 2e-3, "--pp=2 --loss_scale=1024:5"), ("bfloat16", 1e-2, "--tp=2"), ("float16", 2e-3, "--parallel=zero2")]
    layouts = layouts[:None if os.environ.get("LAYOUTS") == "all" else 2]
    many(tmp_path, [[*RUN, f"--data={store}", f"--out={tmp_path}/{i}", f"--trace={tmp_path}/{i}.jsonl", f"--dtype={dtype}", *flags.split()] for i, (dtype, _, flags) in enumerate(layouts)], 2)
    for i, (_, tolerance, _) in enumerate(layouts):
        records = joined(trace(tmp_path / f"{i}.jsonl"))
        equals_one(records, one, tolerance)
        assert any(records[t][2] != one[0][t][2] for t in records)
    # 23 good steps with the scale doubled after every fifth
    assert json.loads((max((tmp_path / "1").glob("ckpt_*")) / "run.json").read_text())["scale"] == 1024 * 2 ** 4


@pytest.mark.parametrize("world,flags,words", [
    (1, "--parallel=zero2", ["needs torchrun"]), (2, "--parallel=zero4", ["zero3"]), (2, "--offload=cpu", ["--parallel=zero1"]), (2, "--offload=disk", ["disk:FOLDER"]),
    (2, "--tp=4", ["multiple of 4 ranks"]), (6, "--tp=2 --pp=2 --global_batch=6", ["multiple of 4 ranks"]), (3, "--tp=3", ["--n_head (2)"]), (2, "--tp=2 --dropout=0.1", ["--dropout=0"]),
    (2, "--pp=2 --dropout=0.1", ["--dropout=0"]), (2, "--parallel=zero1 --batch_ramp", ["--batch_ramp"]), (2, "--parallel=zero3 --global_batch=7", ["multiple of 2"]),
    (2, "--pp=2 --ltd_choice=importance", ["importance"]), (8, "--pp=8 --global_batch=8 --batch_size=1", ["8 stages"]), (4, "--pp=4 --pp_schedule=interleaved", ["8 stages"]),
    (2, "--pp=2 --batch_size=8", ["at least 2"]), (2, "--pp=2 --batch_size=3", ["equal micro-batches"]), (2, "--pp_schedule=gpipe", ["--pp=1"]), (2, "--pp=2 --pp_schedule=zigzag", ["interleaved"]),
    (2, "--recompute=all", ["selective"]), (1, "--recompute=selective --compile", ["--recompute=block"]), (2, "--loss_scale=0:5", ["START:GROW"]), (2, "--loss_scale=1024:0 --dtype=float32", ["no effect"]), (2, "--profile=5", ["START:STEPS"])])
def test_layouts_that_cannot_be_are_refused_by_name(monkeypatch, world, flags, words):
    if world > 1:
        monkeypatch.setenv("RANK", "0")
    cfg, given = parse_flags(Config, [*[f for f in TINY if f.partition("=")[0] not in flags], *flags.split()], "")
    settle(cfg, given, "cpu")
    with pytest.raises(ValueError) as e:
        check(cfg, given, world)
    assert all(word in str(e.value) for word in words), e.value


# -----------------------------------------------------------------------------
# checkpoints


def test_a_run_goes_from_layout_to_layout_and_out_as_one_plain_file(store, one, tmp_path):
    """Saved by zero3 on 4 ranks, continued by one process, by tp on 2, by pp x zero1 on 2, and by one process: equal to one
    that was never disturbed. Then a sample and a plain file from shards."""
    out, records = f"--out={tmp_path}/run", {}

    def leg(stop, *layout, ranks=1):
        file = tmp_path / f"{stop}.jsonl"
        start = ["--resume"] if records else [*RUN, f"--data={store}"]
        ok(train(*start, out, f"--trace={file}", f"--stop_step={stop}", *layout, ranks=ranks))
        records.update(joined(trace(file)))
    leg(5, "--parallel=zero3", ranks=4)
    text = ok(train("--sample", "--resume", out))
    ok(train("--resume", out, f"--export={tmp_path}/model.pt"))
    file = torch.load(tmp_path / "model.pt")
    model = GPT(file["vocab_size"], 64, 4, 2, 32)
    model.load_state_dict(file["model"])
    assert file["step"] == 5 and file["config"]["parallel"] == "zero3" and len(text) > 5
    leg(10, "--parallel=ddp")
    legs = {13: ["--tp=2", "--parallel=ddp"], 17: ["--pp=2", "--tp=1", "--parallel=zero1"]}
    many(tmp_path, [["--resume", out, f"--trace={tmp_path}/{stop}.jsonl", f"--stop_step={stop}", *layout] for stop, layout in legs.items()], 2)
    for stop in legs:
        records.update(joined(trace(tmp_path / f"{stop}.jsonl")))
    leg(0, "--pp=1", "--parallel=ddp")
    equals_one(records, one)
    mine = torch.load(max((tmp_path / "run").glob("ckpt_*.pt")))["model"]
    # AdamW divides by small numbers, so that weights differ by more than losses do
    assert mine.keys() == one[2].keys() and all((mine[k] - one[2][k]).abs().max() < 1e-3 for k in mine)


def test_incomplete_and_damaged_shards_are_named_and_the_ones_before_them_used(store, one, tmp_path):
    """A folder that a killed save left, one whose shard is cut short, one whose index would run code: each is passed over."""
    out = tmp_path / "run"
    ok(train(*RUN, f"--data={store}", f"--out={out}", "--ckpt_async", "--save_interval=3", "--keep_ckpts=9", "--stop_step=12"))
    assert [p.name for p in checkpoint.checkpoints(out)] == [f"ckpt_{i:07d}" for i in (3, 6, 9, 12)]
    shutil.copytree(out / "ckpt_0000012", out / "ckpt_0000015.tmp")

    class Bad:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)
    (out / "ckpt_0000012" / ".metadata").write_bytes(pickle.dumps(Bad()))
    shard = next((out / "ckpt_0000009").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-500])
    printed = ok(train("--resume", f"--out={out}", f"--trace={tmp_path}/t.jsonl"))
    assert "ckpt_0000015.tmp is incomplete" in printed and "ckpt_0000012 does not open" in printed and "ckpt_0000009 does not open" in printed
    assert "resumed from" in printed and "ckpt_0000006 at step 6" in printed and not (tmp_path / "ran").exists()
    records = joined(trace(tmp_path / "t.jsonl"))
    assert min(records) == 6 and all(records[t][2] == one[0][t][2] for t in records)        # one process: bit for bit


@pytest.mark.parametrize("kind", ["file", "async", "one of two ranks"])
def test_a_full_disk_costs_a_checkpoint_and_never_the_run_or_the_one_before(store, one, tmp_path, kind):
    """A file may not grow beyond half a checkpoint from the second save on (RLIMIT_FSIZE: the write fails as on a full disk),
    on the last rank only where there are two."""
    (tmp_path / "go.py").write_text(f"""import resource, signal, sys; sys.path.insert(0, {str(ROOT)!r})
import os, checkpoint, flags, train
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save = checkpoint.Saver.save
def limited(self, step, *a):
    if self.rank == int(os.environ.get('WORLD_SIZE', 1)) - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30 if step in (4, 23) else 60_000, resource.RLIM_INFINITY))
    return save(self, step, *a)
checkpoint.Saver.save = limited
flags.run_command(train.main)
""")
    layout = {"file": [], "async": ["--ckpt_async"], "one of two ranks": ["--parallel=zero1"]}[kind]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if kind == "one of two ranks" else []
    printed = ok(command(*launcher, tmp_path / "go.py", *RUN, *layout, f"--data={store}", f"--out={tmp_path}/run", f"--trace={tmp_path}/t.jsonl", "--save_interval=4", "--keep_ckpts=1"))
    assert printed.count("could not be written") == 4 and "the newest checkpoint is ckpt_0000004" in printed
    equals_one(joined(trace(tmp_path / "t.jsonl")), one)
    assert [p.stem for p in checkpoint.checkpoints(tmp_path / "run")] == ["ckpt_0000023"] and not list((tmp_path / "run").glob("*.tmp"))


def test_a_full_disk_costs_lines_of_the_log_and_not_the_run(store, one, tmp_path):
    """The log and the trace may hold 3,000 bytes each while checkpoints are not limited: what is there can be read."""
    (tmp_path / "go.py").write_text(f"""import os, sys; sys.path.insert(0, {str(ROOT)!r})
import flags, train
write, sizes = os.write, {{}}
def full(fd, line):
    room = 3000 - sizes.get(fd, 0)
    if room <= 0: raise OSError(28, "No space left on device")
    sizes[fd] = sizes.get(fd, 0) + write(fd, line[:room])
    return min(room, len(line))
os.write = full
flags.run_command(train.main)
""")
    printed = ok(command(tmp_path / "go.py", *RUN, f"--data={store}", f"--out={tmp_path}/run", f"--trace={tmp_path}/t.jsonl"))
    assert 1 <= printed.count("could not be written (") <= 2 and "steps: 23 of 23" in printed
    assert len((tmp_path / "t.jsonl").read_bytes()) == 3000 and torch.equal(torch.load(tmp_path / "run" / "ckpt_0000023.pt")["model"]["wte.weight"], one[2]["wte.weight"])


def test_a_checkpoint_written_beside_the_training_has_its_name_before_the_next_is_due(store, one, tmp_path):
    """Killed some 20 steps behind a save, of which every 40th step begins one: that one is complete."""
    t = tmp_path / "t.jsonl"
    flags = [*RUN, f"--data={store}", f"--out={tmp_path}/run", "--ckpt_async", "--save_interval=400", "--train_tokens=2000000", "--learning_rate=1e-4"]
    ok(train(*flags, "--stop_step=1"))
    agent = subprocess.Popen([sys.executable, str(ROOT / "train.py"), "--resume", f"--out={tmp_path}/run", f"--trace={t}", "--save_interval=40"], cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL)
    wait_for(lambda: steps_in(t) > 70 and steps_in(t) % 40 > 20, 90, "no steps")
    agent.kill()
    agent.wait()
    path, content = checkpoint.newest(tmp_path / "run")
    assert content["step"] == steps_in(t) // 40 * 40 and path.is_dir()


# -----------------------------------------------------------------------------
# loss of a rank, a host, a message


def ranks_of(agent):
    return [int(p) for p in subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True).stdout.split()]


def steps_in(file):
    return max((r["step"] for r in map(json.loads, file.read_text().splitlines())), default=0) if file.exists() else 0


def wait_for(condition, seconds, what):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, what
        time.sleep(.02)


def end(*agents):
    for agent in agents:
        for pid in [*ranks_of(agent), agent.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        agent.wait()


def test_killed_ranks_under_torchruns_restarts_lose_and_repeat_no_sample(store, tmp_path):
    """KILLS (2, or as many as the environment says) SIGKILLs of a random rank at random steps: ids and kept tokens of the
    joined trace equal an undisturbed run's, losses to 1e-5."""
    kills, rng = int(os.environ.get("KILLS", 2)), random.Random(5)
    flags = [*TINY, *ON, f"--data={store}", f"--train_tokens={90000 if kills > 5 else 20000}", "--save_interval=5", "--parallel=zero2"]
    ok(train(*flags, f"--out={tmp_path}/one", f"--trace={tmp_path}/one.jsonl", "--parallel=ddp"))
    want, t = joined(trace(tmp_path / "one.jsonl")), tmp_path / "t.jsonl"
    agent = launch(ROOT / "train.py", *flags, f"--out={tmp_path}/run", f"--trace={t}", "--resume", options=("--standalone", f"--max-restarts={kills}", "--monitor-interval=0.2"),
                   stdout=open(tmp_path / "out", "w"), stderr=subprocess.STDOUT)
    done = 0
    try:
        for i in range(kills):
            goal = rng.randint(len(want) * i // kills + 1, len(want) * (i + 1) // kills - 6)
            wait_for(lambda: steps_in(t) >= goal or agent.poll() is not None, 100, (tmp_path / "out").read_text()[-3000:])
            pids = ranks_of(agent)
            assert len(pids) == 2, (tmp_path / "out").read_text()[-3000:]
            os.kill(rng.choice(pids), signal.SIGKILL)
            done += 1
            wait_for(lambda: not set(pids) & set(ranks_of(agent)), 60, "the ranks were not started again")
        assert agent.wait(100) == 0, (tmp_path / "out").read_text()[-3000:]
    finally:
        end(agent)
    got = joined(trace(t))
    assert done == kills and (tmp_path / "out").read_text().count("resumed from") >= 1 and got.keys() == want.keys()
    for step in want:
        assert got[step][:2] == want[step][:2] and got[step][3:] == want[step][3:] and abs(got[step][2] - want[step][2]) < 1e-5, step


def test_a_hung_rank_ends_the_run_with_a_named_timeout(store, tmp_path):
    """Rank 1 stops (SIGSTOP) in mid run: rank 0 waits --dist_timeout seconds for it, says who stayed away, and ends."""
    t = tmp_path / "t.jsonl"
    agent = launch(ROOT / "train.py", *TINY, *ON, f"--data={store}", "--train_tokens=200000", f"--out={tmp_path}/run", f"--trace={t}", "--dist_timeout=5",
                   stdout=open(tmp_path / "out", "w"), stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: steps_in(t) > 10, 60, "no steps")
        stopped = max(ranks_of(agent))
        os.kill(stopped, signal.SIGSTOP)
        said = lambda: "is lost, or hangs longer than --dist_timeout=5 s" in (tmp_path / "out").read_text()
        wait_for(said, 30, (tmp_path / "out").read_text()[-2000:])
        text = (tmp_path / "out").read_text()
        assert "rank 1 is silent since step" in text and "rank 0 is silent" not in text and "--resume" in text and "Traceback" not in text.partition("error: another rank")[0]
    finally:
        end(agent)


def test_two_hosts_meet_and_one_goes_on_when_the_other_is_lost(store, tmp_path, request):
    """Two agents, at 127.0.0.1, where the rendezvous is, and 127.0.0.2, each with a rank; nothing is shared but data and the run's folder. The second loses
    its agent and rank by SIGKILL, and the first goes on alone from the last checkpoint: samples and kept tokens as ever.
    With REJOIN in the environment the second comes back, and both go on; with NETNS each has a network of its own, joined
    by a virtual cable (needs root)."""
    back = "REJOIN" in os.environ
    flags = [*TINY, *ON, f"--data={store}", f"--train_tokens={500_000 if back else 40_000}", "--save_interval=5", "--parallel=zero2", "--dist_timeout=20",
             "--learning_rate=2e-4"]        # at a high rate 1,000 steps blow the last bit up
    ok(train(*flags, f"--out={tmp_path}/one", f"--trace={tmp_path}/one.jsonl", "--parallel=ddp"))
    want, t = joined(trace(tmp_path / "one.jsonl")), tmp_path / "t.jsonl"
    port = random.Random().randint(20000, 60000)
    addresses, prefix, cable = ("127.0.0.1", "127.0.0.2"), ((), ()), {}
    if "NETNS" in os.environ:
        names = [f"winnow{port}{i}" for i in (0, 1)]
        addresses, prefix, cable = ("10.77.0.1", "10.77.0.2"), [("ip", "netns", "exec", name) for name in names], {"GLOO_SOCKET_IFNAME": "cable"}
        for words in (*[f"netns add {name}" for name in names], f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}",
                      *[f"-n {name} addr add {address}/24 dev cable" for name, address in zip(names, addresses)], *[f"-n {name} link set {dev} up" for name in names for dev in ("lo", "cable")]):
            subprocess.run(["ip", *words.split()], check=True)
            request.addfinalizer(lambda: [subprocess.run(["ip", "netns", "del", name], capture_output=True) for name in names])

    def host(i):
        return launch(ROOT / "train.py", *flags, f"--out={tmp_path}/run", f"--trace={t}", "--resume", ranks=1, stdout=open(tmp_path / f"out{i}", "a"), stderr=subprocess.STDOUT,
                      options=("--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={addresses[0]}:{port}", "--rdzv-id=x", f"--local-addr={addresses[i]}",
                               "--monitor-interval=0.2", f"--rdzv-conf=last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={i == 0}"),
                      prefix=prefix[i], env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **cable})
    agents = [host(0), host(1)]
    try:
        wait_for(lambda: steps_in(t) > 12, 90, (tmp_path / "out0").read_text()[-3000:])
        assert {r for _, r in trace(t)} == {0, 1}, "both hosts take part"
        end(agents[1])
        if back:
            seen = steps_in(t)
            wait_for(lambda: steps_in(t) > seen + 20, 90, (tmp_path / "out0").read_text()[-3000:])
            agents.append(host(1))
            wait_for(lambda: max(s for s, r in trace(t) if r == 1) > seen + 40, 90, (tmp_path / "out0").read_text()[-3000:])
        assert agents[0].wait(200) == 0, (tmp_path / "out0").read_text()[-3000:]
    finally:
        end(*agents)
    # a step that one host made alone holds the whole batch; earlier halves of it, before a resume, do not count
    got, sizes = {}, {step: len(w[0]) for step, w in want.items()}
    for r in map(json.loads, open(t)):
        parts = got.setdefault(r["step"], {})
        if len(r["sample_ids"]) == sizes[r["step"]] or any(len(p["sample_ids"]) == sizes[r["step"]] for p in parts.values()):
            parts.clear()
        parts[r["rank"]] = r
    got = {step: joined({(step, k): r for k, r in parts.items()})[step] for step, parts in got.items()}
    alone = sum(len(json.loads(line)["sample_ids"]) == 8 for line in open(t))
    assert got.keys() == want.keys() and alone > 20 and (tmp_path / "out0").read_text().count("resumed from") >= 1 + back
    for step in want:
        assert got[step][:2] == want[step][:2] and abs(got[step][2] - want[step][2]) < 1e-5, step


def test_sigterm_to_torchrun_saves_in_time(store, one, tmp_path):
    """As a scheduler ends a job: torchrun hands SIGTERM on, the ranks save after the step under way, and a resume joins exactly."""
    t = tmp_path / "t.jsonl"
    agent = launch(ROOT / "train.py", *RUN, f"--data={store}", f"--out={tmp_path}/run", f"--trace={t}", "--parallel=zero3", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: steps_in(t) > 3, 60, "no steps")
        agent.send_signal(signal.SIGTERM)
        agent.wait(40)
    finally:
        end(agent)
    (path, content), steps = checkpoint.newest(tmp_path / "run"), steps_in(t)
    assert path.is_dir() and content["step"] == steps + 1 < 23
    ok(train("--resume", f"--out={tmp_path}/run", f"--trace={t}", "--parallel=ddp"))
    records = trace(t)
    equals_one(joined({k: v for k, v in records.items() if k[1] == 0 or k[0] <= steps}), one)


# -----------------------------------------------------------------------------
# monitoring


def test_profile_and_tensorboard_leave_their_files_and_records_have_the_monitors(store, tmp_path):
    printed = ok(train(*TINY, *OFF, f"--data={store}", "--train_tokens=6000", f"--out={tmp_path}/run", "--profile=3:2", "--tensorboard", ranks=2))
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert any("gloo" in str(e.get("name")) for e in events) and sum("AdamW.step" in str(e.get("name")) for e in events) >= 2
    assert printed.count("profile: messages under way") == 1 and "Self CPU" in printed
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(12)) and len(events.Scalars("val_loss")) == 2
    record = [r for r in map(json.loads, open(tmp_path / "run" / "log.jsonl")) if "loss" in r][-1]
    assert 0 <= record["data_wait"] < 1 and record["memory_mb"] > 50 and record["norm"] > 0 and record["tok_s"] > 0
    assert "peak_memory_mb: " in printed
