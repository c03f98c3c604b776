"""plan.py: learning rates, token accounting, and the step counts of the published GPT-3 recipe."""
import numpy as np
import pytest
from conftest import make_store

import difficulty
from data import Store
from plan import effective_length, lr_at, make_plan

PLAIN = dict(train_tokens=100 * 512, budget="layer_tokens", global_batch=8, block_size=64, n_layer=6, pool=["off"], seqlen="off", seqlen_multiple=8,
             ltd="off", ltd_multiple=16, learning_rate=1e-3, min_lr=1e-4, warmup_tokens="0", decay_tokens="100%", lr_decay="cosine", lr_unit="")


def plan(**kw):
    return make_plan(**{**PLAIN, **kw})


def test_learning_rate_has_the_published_values():
    """C05: the floor is part of the cosine's shape."""
    gpt3 = dict(peak=2e-4, floor=1e-6, warmup=3e9, decay=300e9)
    want = {1.5e9: 1e-4, 3e9: 2e-4, 77.25e9: 1.7085712e-4, 151.5e9: 1.005e-4, 225.75e9: 3.0142875e-5, 300e9: 1e-6, 9e12: 1e-6}
    assert lr_at(list(want), **gpt3).tolist() == pytest.approx(list(want.values()), rel=1e-7)     # the digits published
    assert lr_at([5120, 8192], 1e-3, 1e-4, 2048, 8192).tolist() == pytest.approx([5.5e-4, 1e-4])


@pytest.mark.parametrize("warmup,decay", [(4096, 4096), (0, 4096), (0, 0)])
def test_learning_rate_has_no_division_by_zero_at_the_edges(warmup, decay):
    """C02, C03, C04."""
    lr = lr_at(np.arange(0, 12) * 1024, 1e-3, 1e-4, warmup, decay)
    assert np.isfinite(lr).all() and (lr <= 1e-3).all() and lr[1] > 0
    assert lr_at([max(warmup, decay), 1e12], 1e-3, 1e-4, warmup, decay).tolist() == [1e-4, 1e-4]


def test_learning_rate_refuses_a_warmup_beyond_the_decay_and_nothing_to_decay_over():
    """C03."""
    with pytest.raises(ValueError, match="warmup_tokens"):
        lr_at(1, 1e-3, 1e-4, 8192, 4096)
    with pytest.raises(ValueError, match="lr_decay=constant"):
        plan(decay_tokens="0")
    assert plan(decay_tokens="0", lr_decay="constant").lr.tolist() == [1e-3] * 100


def test_the_first_step_has_a_learning_rate():
    """C04: the step under way counts."""
    assert plan(warmup_tokens="50%").lr[0] == pytest.approx(1e-3 / 50)


@pytest.mark.parametrize("sizes,want", [((24, 22, 2048, 128), 288), ((24, 22, 2048, 1088), 1168), ((12, 10, 1024, 128), 277), ((24, 22, 1024, 128), 202),
                                        ((24, 22, 512, 128), 160), ((24, 22, 1064, 656), 690), ((24, 22, 80, 128), 80)])
def test_effective_length_has_the_published_values(sizes, want):
    n_layer, n_ltd, length, keep = sizes
    assert effective_length(length, min(keep, length), n_layer, n_ltd) == want


GPT3 = dict(global_batch=512, block_size=2048, n_layer=24)
CL, LTD = "truncate:80..2048:{}", "128..2048:{}"


@pytest.mark.parametrize("budget,seqlen,ltd,steps,sampled", [
    (300e9, "off", "off", 286_103, None),
    (300e9, "off", LTD.format(200_000), 372_789, 390.9),
    (300e9, CL.format(110_000), "off", 339_170, 355.6),
    (300e9, CL.format(110_000), LTD.format(200_000), 377_264, 395.6),
    (150e9, "off", "off", 143_052, None),
    (150e9, "off", LTD.format(100_000), 186_395, None),
    (150e9, CL.format(55_000), LTD.format(100_000), 188_633, None)])
def test_the_gpt3_recipe_takes_the_published_steps(budget, seqlen, ltd, steps, sampled):
    p = plan(**GPT3, train_tokens=int(budget), seqlen=seqlen, ltd=ltd)
    assert p.steps == steps
    assert p.spent["layer_tokens"][-2] < budget <= p.spent["layer_tokens"][-1]
    if sampled:
        assert round(p.spent["sampled"][-1] / 1e9, 1) == sampled


def test_learning_rate_depends_on_tokens_alone():
    """C06, C07, C09: equal at equal tokens for any length of the rows and any batch; tokens are the default unit."""
    a, b, c = plan(budget="tokens"), plan(budget="tokens", seqlen="truncate:16..64:40%"), plan(budget="tokens", global_batch=16)
    lr = dict(zip(a.spent["tokens"][1:].tolist(), a.lr))
    for p in (b, c):
        shared = [(lr[t], v) for t, v in zip(p.spent["tokens"][1:].tolist(), p.lr) if t in lr]
        assert len(shared) > 3 and all(x == y for x, y in shared)
    assert c.steps * 2 == a.steps
    by_step = plan(seqlen="truncate:16..64:40%", lr_unit="steps")
    assert by_step.lr[10] == plan().lr[10]


def test_budget_units_end_a_run_where_they_say():
    kw = dict(seqlen="truncate:16..64:40%", ltd="16..64:70%")
    assert plan(budget="steps", **kw).steps == plan().steps == 100
    assert plan(budget="tokens", **kw).spent["tokens"][-1] >= 51_200 > plan(budget="tokens", **kw).spent["tokens"][-2]
    p = plan(seqlen="reshape:24..64:40%")
    assert p.rows[0] == 8 * 3 and p.tokens[0] == 8 * 64 and p.spent["layer_tokens"][1] == 8 * 3 * 24    # padding costs compute, has no loss


def test_plan_knows_the_pool_of_every_step(tmp_path):
    store = Store(make_store(tmp_path, np.zeros(64_001)), "train", 64)
    difficulty.write_column(store, "voc", np.random.default_rng(0).normal(size=1000), 0)
    p = plan(pool=["voc:10%..100%:50%"], store=store)
    assert p.pool[0] == 100 and p.pool[-1] == 1000 and (np.diff(p.pool) >= 0).all()
    easiest = np.argsort(store.column("voc"), kind="stable")[:100]
    assert set(p.sampler.ids(0)) <= set(easiest) and not {i for t in range(100) for i in p.sampler.ids(t)} <= set(easiest)
    assert p.limits["voc"][0] == 10


@pytest.mark.parametrize("kw,word", [(dict(seqlen="cut:16..64:40%"), "truncate"), (dict(ltd="16..128:70%"), "block_size"), (dict(ltd="voc:16..64:70%"), "--ltd"),
                                     (dict(n_layer=2, ltd="16..64:70%"), "n_layer"), (dict(pool=["off", "voc:1%..100%:4"]), "--pool=off"),
                                     (dict(pool=["voc:1%..9%:4", "voc:1..2:3"]), "once"), (dict(batch_ramp=True), "--batch_ramp"), (dict(ltd="16..64:70%", ltd_dense="middle"), "ends, first"),
                                     (dict(budget="token"), "layer_tokens"), (dict(warmup_tokens="two"), "--warmup_tokens=two"), (dict(train_tokens=0), "train_tokens")])
def test_plan_refuses_what_makes_no_run(kw, word):
    with pytest.raises(ValueError, match=word):
        plan(**kw)


def test_batch_ramp_spends_what_the_techniques_spend_on_fewer_whole_dense_samples():
    kw = dict(seqlen="truncate:16..64:40%", ltd="16..64:70%")
    p, ramp = plan(**kw), plan(**kw, batch_ramp=True)
    assert (ramp.length == 64).all() and (ramp.keep == 64).all() and ramp.batch[0] == 2 and ramp.batch[-1] == 8 and abs(ramp.steps - p.steps) <= 2
    n = min(p.steps, ramp.steps)
    assert np.abs(np.diff(ramp.spent["layer_tokens"])[:n] - np.diff(p.spent["layer_tokens"])[:n]).max() <= 32     # half a sample
    assert np.array_equal(ramp.rows, ramp.batch) and ramp.spent["sampled"][-1] == ramp.spent["tokens"][-1] == ramp.spent["layer_tokens"][-1]


def test_dense_ends_are_a_choice():
    layers = {dense: plan(ltd="16..16:0", ltd_dense=dense).ltd_layers for dense in ("ends", "first", "last", "none")}
    assert layers == {"ends": range(1, 5), "first": range(1, 6), "last": range(0, 5), "none": range(0, 6)} and not plan().ltd_layers
    assert plan(ltd="16..16:0", ltd_dense="none").spent["layer_tokens"][1] == 8 * 16


def reference_pace(start, end, total, steps):
    """The reference's K, by 8: it is cut at `end` only, and goes on behind `total` where `end` is no multiple."""
    d = np.floor(start + (end - start) * np.arange(steps) / total)
    return np.minimum(d - d % 8, end)


def test_the_published_counts_of_fine_tuning_gpt2_and_vit_are_met():
    """recipes: PTB in two epochs of 262 batches of 4, micro-batches of 2: 1373 micro-steps with 2,147,024 layer-tokens (22 dropped layers),
    1344 with 2,148,032 (20); CIFAR: 5,474 steps with 305,784,192, which is over all layers of 32 rows."""
    for dense, n, tokens in (("ends", 1373, 2_147_024), ("2,2", 1344, 2_148_032)):
        p = make_plan(**PLAIN | dict(train_tokens=2 * 262 * 4096, global_batch=4, block_size=1024, n_layer=24, ltd="128..1024:400", ltd_multiple=8, ltd_dense=dense))
        micro = np.repeat(2 * ((1024 * (24 - len(p.ltd_layers)) + p.keep * len(p.ltd_layers)) // 24), 2).cumsum()
        at = int(np.searchsorted(micro, 2 * 262 * 4096))
        assert (at + 1, micro[at], p.steps) == (n, tokens, -(-n // 2))
    p = make_plan(**PLAIN | dict(budget="steps", train_tokens=5474 * 128 * 197, global_batch=128, block_size=197, n_layer=12, ltd="32..197:3910", ltd_multiple=8))
    K = reference_pace(32, 197, 3910, 5474)
    assert p.steps == 5474 and int(32 * (10 * K + 2 * 197).sum()) == 305_784_192
    assert set(np.flatnonzero(p.keep != K)) == set(range(3910, 3982))       # ours is there when it is said to be
    with pytest.raises(ValueError, match="ltd_dense=two.*2,2"):
        make_plan(**PLAIN | dict(ltd="16..64:70%", ltd_dense="two"))


def test_bert_larges_plans_are_the_published_ones():
    """2.0M steps dense, 2.72M with random-LTD at the same 1049B layer-tokens."""
    kw = PLAIN | dict(train_tokens=2_000_000 * 1024 * 512, global_batch=1024, block_size=512, n_layer=24)
    assert make_plan(**kw).steps == 2_000_000
    assert round(make_plan(**kw | dict(ltd="128..512:2000000", ltd_multiple=16)).steps / 1e6, 2) == 2.72
