"""bench.py as a command: its tables, its JSON line, its refusals."""
import json

import pytest
from conftest import OFF, ON, ROOT, TINY, command, ok, refused, train


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
    assert result["arms"]["dense"] == {"lr": 4e-3, "mean": round(sum(losses) / 2, 4), "sd": round(abs(losses[0] - losses[1]) / 2**.5, 4), "n": 2}
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
    refused(command(ROOT / "bench.py", "tables"), "step | kernel | analyze | sampler | table")
