"""parallel.py: sharded ranks compute what one process computes, and their checkpoints are anybody's."""
import pytest
import torch
from conftest import ON, TINY, joined, ok, refused, trace, train


def test_one_run_handed_from_layout_to_layout_equals_one_process(store, tmp_path):
    """zero1, zero2, zero3 with offload and recompute on two ranks, then one process, each from the other's checkpoint, curriculum and token dropping on,
    clipping at work: ids, kept tokens and rates equal, losses to 1e-5 (float32, sums in another order)."""
    flags = [*TINY, *ON, f"--data={store}", "--train_tokens=12000", "--grad_clip=0.3", "--save_interval=1000"]
    ok(train(*flags, f"--out={tmp_path}/one", f"--trace={tmp_path}/one.jsonl"))
    whole, out, records = joined(trace(tmp_path / "one.jsonl")), f"--out={tmp_path}/run", {}
    first = flags
    for stop, layout in ((6, ["--parallel=zero1"]), (12, ["--parallel=zero2"]), (18, ["--parallel=zero3", "--offload=cpu", "--recompute"]), (0, ["--parallel=ddp"])):
        file = tmp_path / f"{stop}.jsonl"
        ok(train(*first, out, f"--trace={file}", f"--stop_step={stop}", *layout, ranks=1 if stop == 0 else 2))
        records |= joined(trace(file))
        first = ["--resume"]
    assert records.keys() == whole.keys() and len(whole) > 24
    for t in whole:
        assert records[t][:2] == whole[t][:2] and records[t][3:] == whole[t][3:], t
        assert abs(records[t][2] - whole[t][2]) < 1e-5, (t, records[t][2], whole[t][2])
    a, b = (torch.load(max((tmp_path / n).glob("ckpt_*.pt"))) for n in ("one", "run"))
    assert a["model"].keys() == b["model"].keys() and all((a["model"][k] - b["model"][k]).abs().max() < 1e-3 for k in a["model"])   # after 27 steps of AdamW, which divides by small numbers


@pytest.mark.parametrize("flags,words", [(["--parallel=zero2"], ["several ranks"]), (["--parallel=zero4"], ["zero3"]), (["--offload=cpu"], ["no effect"]), (["--offload=disk"], ["cpu"])])
def test_layouts_that_cannot_be_are_refused(store, flags, words):
    refused(train(*TINY, f"--data={store}", *flags), *words)
