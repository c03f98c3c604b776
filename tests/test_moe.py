"""model.MoE: equal to a dense loop over experts, its auxiliary losses to their formulas, and training with it as exact as without."""
import json

import pytest
import torch
import torch.nn.functional as F
from conftest import ON, ROOT, TINY, command, joined, many, ok, trace, train
from torch.utils.flop_counter import FlopCounterMode

import ltd
from model import GPT, MoE, forward_flops, moe_layers


def make(top_k=1, E=4, C=16, **kw):
    torch.manual_seed(0)
    m = MoE(C, E, top_k, **kw).double()
    for p in m.parameters():
        torch.nn.init.normal_(p, std=.3)
    return m


def dense_loop(m, x):
    """Every expert on every token, weighted by what the routing says: zero for those that were not chosen. (N, C), and p (N, E)."""
    p = F.linear(x, m.router.weight).softmax(-1)
    order = p.sort(dim=-1, descending=True)
    y = torch.zeros_like(x)
    for n in range(len(x)):
        chosen = order.indices[n, :m.top_k]
        weight = order.values[n, :m.top_k] / (order.values[n, :m.top_k].sum() if m.top_k > 1 else 1)
        for w, e in zip(weight, chosen):
            y[n] = y[n] + w * (m.proj[e] @ F.gelu(m.fc[e] @ x[n]))
    return y, p


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_routed_experts_equal_a_dense_loop_over_them_forward_and_backward(top_k):
    """float64 products in another order: 1e-12."""
    m, x = make(top_k, balance=0.0, z=0.0), torch.randn(37, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = []
    for f in (lambda x: m(x), lambda x: dense_loop(m, x)[0]):
        leaf = x.clone().requires_grad_()
        m.zero_grad()
        y = f(leaf)
        (y * torch.arange(16)).sum().backward()
        grads.append((y.detach(), leaf.grad, m.fc.grad, m.proj.grad, m.router.weight.grad))
    for a, b in zip(*grads):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()
    assert (m.load == m.load.round()).all() and m.load.sum() == 37 * top_k


def test_an_expert_that_nobody_wants_gets_no_token_and_a_zero_gradient():
    m = make(2)
    with torch.no_grad():
        m.router.weight[3] = 0
        m.router.weight[:3] = torch.arange(1, 4)[:, None]
    x = torch.rand(9, 16, dtype=torch.float64)
    m(x).sum().backward()
    assert m.load.tolist() == [0, 9, 9, 0] and (m.fc.grad[3] == 0).all() and m.fc.grad[2].abs().sum() > 0


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_auxiliary_losses_are_their_formulas_and_reach_the_router_by_backward(top_k):
    """Balance: E sum f P, z: mean of squared logsumexp; the gradient that backward adds is theirs times the scale."""
    m, x = make(top_k, balance=.7, z=.3), torch.randn(29, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    m.aux_scale.fill_(5.0)
    (m(x) * 0).sum().backward()
    got = m.router.weight.grad.clone()
    m.zero_grad()
    logits = F.linear(x, m.router.weight)
    p = logits.softmax(-1)
    chosen = F.one_hot(p.topk(top_k).indices, 4).double().sum(1)                    # (N, E)
    balance = 4 * (chosen.mean(0) / top_k * p.mean(0)).sum()
    (5.0 * (.7 * balance + .3 * torch.logsumexp(logits, -1).square().mean())).backward()
    assert (got - m.router.weight.grad).abs().max() <= 1e-12 * got.abs().max() and got.abs().max() > 0


def test_flops_with_experts_agree_with_torchs_counter():
    model = GPT(97, 64, 4, 4, 32, n_expert=4, expert_top_k=2)
    x = torch.randint(97, (2, 64), generator=torch.Generator().manual_seed(0))
    keep = ltd.draw(1, 0, torch.arange(2), model.ltd_layers, 64, 16)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(x, x, keep)
    assert list(moe_layers(4, 4, 2)) == [1, 3]
    ours = 2 * forward_flops(4, 32, GPT.ends_flops(32, 64, 97), 64, 16, 2, False, moe=(1, 1), n_expert=4, expert_top_k=2)
    assert ours == pytest.approx(counter.get_total_flops(), rel=.02)


def test_runs_with_experts_resume_exactly_and_equal_one_process_under_every_engine(store, tmp_path):
    """With curriculum and token dropping. The same micro-batches everywhere, because the auxiliary losses are means over each."""
    flags = [*TINY, *ON, f"--data={store}", "--train_tokens=6000", "--n_expert=4", "--expert_top_k=2", "--batch_size=2", "--dist_timeout=60"]
    ok(train(*flags, f"--out={tmp_path}/one", f"--trace={tmp_path}/one.jsonl"))
    want = joined(trace(tmp_path / "one.jsonl"))
    ok(train(*flags, f"--out={tmp_path}/cut", f"--trace={tmp_path}/cut.jsonl", "--stop_step=7"))
    ok(train("--resume", f"--out={tmp_path}/cut", f"--trace={tmp_path}/cut.jsonl", "--recompute=block"))
    assert joined(trace(tmp_path / "cut.jsonl")) == want
    layouts = ["--parallel=ddp", "--parallel=zero3 --recompute=block", "--pp=2"]
    many(tmp_path, [[*flags, f"--out={tmp_path}/{i}", f"--trace={tmp_path}/{i}.jsonl", *layout.split()] for i, layout in enumerate(layouts)])
    for i in range(len(layouts)):
        got = joined(trace(tmp_path / f"{i}.jsonl"))
        assert got.keys() == want.keys() and all(got[t][:2] == want[t][:2] and abs(got[t][2] - want[t][2]) < 1e-5 for t in want), layouts[i]
    record = [r for r in map(json.loads, open(tmp_path / "one" / "log.jsonl")) if "loss" in r][-1]
    assert record["expert_shares"].keys() == {"1", "3"} and all(len(s) == 4 and round(sum(s), 3) == 1 for s in record["expert_shares"].values())
    shares = [[r for r in map(json.loads, open(tmp_path / f / "log.jsonl")) if r.get("step") == 3 and "loss" in r][0]["expert_shares"] for f in ("one", "0", "2")]
    assert shares[0] == shares[1] == shares[2]          # of all ranks' rows, and of both stages


@pytest.mark.parametrize("mode", ["reshape", "unequal"])
def test_auxiliary_losses_weigh_one_in_all_over_a_step(store, tmp_path, mode):
    """reshape pads its last piece, and three ranks have 3, 3 and 2 rows: with a balance loss whose weight is large the run equals
    one process that takes the same micro-batches, and the weights of a step's micro-batches add up to 1 (or to dp, which DDP takes the mean of)."""
    (tmp_path / "go.py").write_text(f"""import os, sys; sys.path.insert(0, {str(ROOT)!r})
import flags, train, model
forward, seen = model._Aux.forward, open({str(tmp_path)!r} + '/' + os.environ.get('RANK', '0'), 'w')
def spy(ctx, x, aux, scale):
    seen.write(f"{{scale.item()}}\\n"); seen.flush()
    return forward(ctx, x, aux, scale)
model._Aux.forward = staticmethod(spy)
flags.run_command(train.main)
""")
    ranks = 3 if mode == "unequal" else 1
    flags = [*TINY, "--pool=off", "--ltd=off", f"--seqlen={'reshape:24..64:40%' if mode == 'reshape' else 'off'}", f"--data={store}", "--train_tokens=4000", "--n_expert=4", "--moe_every=4", "--stop_step=3"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"] if ranks == 3 else []
    ok(command(*launcher, tmp_path / "go.py", *flags, f"--out={tmp_path}/run"))
    scales = [list(map(float, open(tmp_path / str(r)))) for r in range(ranks)]
    assert sum(map(sum, scales)) / ranks == pytest.approx(3, rel=1e-6) and (mode == "reshape" or scales[0][0] != scales[2][0])
