"""bench.py as a command: its tables, its JSON line, its refusals."""
import json
import subprocess

import pytest
from conftest import ENV, OFF, ON, ROOT, TINY, command, ok, refused, train, warm


def last_json(printed):
    return json.loads(printed.strip().splitlines()[-1])


def test_step_prints_a_table_and_one_json_line():
    printed = ok(command(ROOT / "bench.py", "step", "--device=cpu", "--rounds=2", "--n_embd=32", "--block_size=64", "--n_head=2"))
    result = last_json(printed)
    assert result["ratio"]["K/T = 1"] == 1 and result["predicted"]["K/T = 0.25"] < result["predicted"]["K/T = 0.5"] < 1
    assert "| K/T = 0.5 |" in printed


def test_kernel_measures_the_torch_path_on_a_cpu_and_says_so():
    printed = ok(command(ROOT / "bench.py", "kernel", "--rounds=1", "--block_size=64", "--n_embd=32"))
    assert "torch path (no GPU)" in printed
    assert set(last_json(printed)["us"]) == {"draw, 22 layers", "gather", "scatter", "dropped layer, forward and backward"}


def test_analyze_and_sampler_measure_rates_memory_and_the_plain_way_beside():
    result = last_json(ok(command(ROOT / "bench.py", "analyze", "--tokens=3e6", "--text_mb=1", "--rounds=1")))
    assert result["mtok_s"]["1"] > result["loop_mtok_s"] > 0 and result["tokenize_mb_s"] > 0 and 10 < result["peak_mb"]["1"] < 1000
    result = last_json(ok(command(ROOT / "bench.py", "sampler", "--samples=1e5", "--resume_step=300")))
    assert result["batch_us"] > 0 and 10 < result["peak_mb"] < 2000


@pytest.fixture(scope="module")
def runs(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, flags in (("a1", [*OFF, "--seed=1"]), ("a2", [*OFF, "--seed=2"]), ("b1", [*ON, "--seed=1"]), ("b2", [*ON, "--seed=2"])):
        ok(train(*TINY, *flags, f"--data={store}", f"--out={folder}/{name}", "--train_tokens=4000", "--eval_interval=4"))
    return folder


def test_table_has_mean_deviation_n_and_every_axis_and_draws(runs, tmp_path):
    printed = ok(command(ROOT / "bench.py", "table", *(runs / n for n in ("a1", "a2", "b1", "b2")), f"--png={tmp_path}/t.png"))
    result = last_json(printed)
    losses = [json.loads((runs / n / "log.jsonl").read_text().splitlines()[-1])["val_loss"] for n in ("a1", "a2")]
    dense = result["arms"]["dense"]
    assert (dense["lr"], dense["n"]) == (4e-3, 2) and dense["rates"] == {"0.004": pytest.approx(sum(losses) / 2)}
    assert (dense["mean"], dense["sd"]) == (round(sum(losses) / 2, 4), round(abs(losses[0] - losses[1]) / 2**.5, 4))
    assert result["arms"]["voc + truncate + LTD"]["n"] == 2 and (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
    for column in ("validation loss, mean (sd)", "paired", "tokens sampled", "layer-tokens", "seconds"):
        assert column in printed


def test_table_refuses_what_cannot_be_compared(runs, store, tmp_path):
    refused(command(ROOT / "bench.py", "table"), "folders")
    refused(command(ROOT / "bench.py", "table", tmp_path), "log.jsonl")
    refused(command(ROOT / "bench.py", "table", runs / "a1", runs / "a1"), "same learning rate and seed")
    ok(train(*TINY, *OFF, f"--data={store}", f"--out={tmp_path}/other", "--train_tokens=2000"))
    refused(command(ROOT / "bench.py", "table", runs / "a1", tmp_path / "other"), "--train_tokens")
    ok(train(*TINY, *OFF, f"--data={store}", f"--out={tmp_path}/cut", "--train_tokens=4000", "--stop_step=2"))
    refused(command(ROOT / "bench.py", "table", tmp_path / "cut"), "--resume")
    refused(command(ROOT / "bench.py", "tables"), "step | kernel | analyze | sampler | engines | table")


def test_the_quick_ablation_has_every_arm_and_column_and_a_second_call_does_nothing(tmp_path):
    env = {**ENV, "OUT": str(tmp_path / "out"), "DATA": str(tmp_path / "data"), "PYTHON": " ".join(warm())}
    run = lambda: subprocess.run([ROOT / "runs" / "ablation.sh", "--quick"], env=env, capture_output=True, text=True, timeout=400)
    printed = ok(run())
    for arm in ("dense", "LTD", "LTD constant 75%", "LTD one draw", "LTD, first and last layer too", "LTD, rate by steps", "TokenBypass", "dense, batches as truncate + LTD", "reshape",
                "truncate", "voc", "voc + reshape", "voc + truncate", "voc + truncate + LTD", "voc + truncate + LTD, rate by steps", "voc hard first", "voc random"):
        assert f"| {arm} | 0.004 of 0.004 |" in printed, arm
    for column in ("mean (sd)", "| n |", "minus dense, paired", "tokens sampled", "with a loss", "layer-tokens", "PFLOP", "seconds", "reaches the dense loss at"):
        assert column in printed
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*/log.jsonl")}
    assert len(stamps) == 17 + 3
    again = ok(run())
    assert printed.endswith(again) and stamps == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*/log.jsonl")}


@pytest.mark.parametrize("words,steps", [(("gpt3_1.3b.sh", "baseline", "300"), 286_103), (("gpt3_1.3b.sh", "ltd", "300"), 372_789), (("gpt3_1.3b.sh", "cl", "300"), 339_170),
                                         (("gpt3_1.3b.sh", "both", "300"), 377_264), (("gpt3_1.3b.sh", "both", "150"), 188_633)])
def test_the_published_recipes_have_the_published_steps(words, steps, tmp_path):
    env = {**ENV, "PYTHON": " ".join(warm()), "DATA": "none"}
    p = subprocess.run([ROOT / "runs" / words[0], *words[1:], "--plan"], env=env, capture_output=True, text=True, timeout=100)
    assert f"\nsteps: {steps}\n" in ok(p)


def test_match_interpolates_between_budgets(tmp_path):
    """Dense ends at 2.0; the arm has 2.2 at half the budget and 1.8 at the whole: even in the logarithm, 2.0 lies at 2 ** -0.5."""
    for name, ltd, budget, loss in (("d", "off", 1000, 2.0), ("a", "25%..100%:70%", 500, 2.2), ("b", "25%..100%:70%", 1000, 1.8)):
        (tmp_path / name).mkdir()
        config = dict(pool=["off"], seqlen="off", ltd=ltd, train_tokens=budget, learning_rate=1e-3, seed=1, warmup_tokens="2%", decay_tokens="100%")
        lines = [{"config": config, "fingerprint": "f", "steps": 9}, {"step": 9, "val_loss": loss, "seconds": 1, "layer_tokens": budget, "sampled": budget, "tokens": budget}]
        (tmp_path / name / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = last_json(ok(command(ROOT / "bench.py", "table", "--match", *(tmp_path / n for n in "dab"))))
    assert result["fraction"]["LTD"] == round(2 ** -.5, 4) and result["goal"] == 2.0
