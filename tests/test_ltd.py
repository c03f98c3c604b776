"""ltd.py: the draw's distribution and invariances, and dropping against its plain definition."""
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

import ltd
from model import GPT, Block, rotary_table, rotate

M64 = (1 << 64) - 1


def mix_reference(z):
    """SplitMix64's finaliser in Python integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def draw_reference(seed, step, row, layer, T, K):
    """The draw of one row as its docstring defines it, in Python integers."""
    golden, s = 0x9E3779B97F4A7C15, seed & M64
    for word in (step, layer, row):
        s = mix_reference((s + golden) & M64) ^ word
    s = mix_reference((s + golden) & M64)
    keys = [(mix_reference((s + golden * (p + 1)) & M64) >> 32, p) for p in range(T)]
    return sorted(p for _, p in sorted(keys)[:K])


def test_mix_equals_splitmix64():
    z = torch.randint(-2**63, 2**63 - 1, (2000,), generator=torch.Generator().manual_seed(0))
    assert [v & M64 for v in ltd.mix(z).tolist()] == [mix_reference(v & M64) for v in z.tolist()]
    assert mix_reference(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF         # SplitMix64's first output for seed 0


@pytest.mark.parametrize("T,K", [(1, 1), (7, 1), (7, 6), (7, 7), (64, 16), (257, 100)])
def test_draw_equals_its_definition(T, K):
    rows = torch.tensor([0, 3, 10**6])
    got = ltd.draw(1337, 42, rows, [1, 5], T, K)
    assert got.dtype == torch.int32 and got.shape == (3, 2, K)
    for b, row in enumerate(rows.tolist()):
        for j, layer in enumerate([1, 5]):
            assert got[b, j].tolist() == draw_reference(1337, 42, row, layer, T, K)
    assert ltd.draw(-5, 0, rows, [1], T, K).shape == (3, 1, K)              # a negative seed is a seed


def test_draw_is_uniform_and_layers_rows_steps_and_seeds_are_independent():
    """Each position is kept with probability K / T, each pair with K(K-1) / T(T-1), within 5 standard deviations."""
    n, T, K = 20_000, 16, 5
    kept = torch.zeros(n, T).scatter(1, ltd.draw(0, 0, torch.arange(n), [1], T, K)[:, 0].long(), 1)
    pairs, p2 = kept.T @ kept / n, K * (K - 1) / (T * (T - 1))
    off = ~torch.eye(T, dtype=bool)
    assert (pairs[off] - p2).abs().max() < 5 * math.sqrt(p2 * (1 - p2) / n)
    assert (pairs.diagonal() - K / T).abs().max() < 5 * math.sqrt(K / T * (1 - K / T) / n)
    for other in (ltd.draw(1, 0, torch.arange(n), [1], T, K), ltd.draw(0, 1, torch.arange(n), [1], T, K), ltd.draw(0, 0, torch.arange(n), [2], T, K),
                  ltd.draw(0, 0, torch.arange(n) + n, [1], T, K)):
        both = (kept * torch.zeros(n, T).scatter(1, other[:, 0].long(), 1)).sum(1).mean()       # expected K * K / T
        assert abs(both - K * K / T) < 5 * math.sqrt(K / n)


def test_draw_depends_on_the_global_row_alone():
    """The same for any split into micro-batches or ranks; different rows draw differently."""
    whole = ltd.draw(1, 2, torch.arange(8), [1, 2], 64, 16)
    parts = torch.cat([ltd.draw(1, 2, torch.arange(i, i + 2), [1, 2], 64, 16) for i in range(0, 8, 2)])
    assert torch.equal(whole, parts)
    assert len({tuple(r) for r in whole.view(-1, 16).tolist()}) == 16


@pytest.mark.parametrize("T,K", [(8, 0), (8, 9), (1 << 17, 5)])
def test_draw_refuses_impossible_sizes(T, K):
    with pytest.raises(ValueError, match=f"K={K}"):
        ltd.draw(0, 0, torch.arange(2), [1], T, K)


def keep_of(B, T, K, seed=0):
    return ltd.draw(seed, 0, torch.arange(B), [1], T, K)[:, 0]


@pytest.mark.parametrize("T,C", [(9, 1), (9, 3), (16, 33)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gather_and_scatter_move_exactly_the_kept_rows(T, C, dtype):
    g = torch.Generator().manual_seed(0)
    for K in range(1, T + 1):
        x, y = torch.randn(3, T, C, generator=g).to(dtype), torch.randn(3, K, C, generator=g).to(dtype)
        keep = keep_of(3, T, K)
        for x in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):       # contiguous, and not
            got, moved = ltd.gather(x, keep), ltd.scatter(x, y, keep)
            for b in range(3):
                assert torch.equal(got[b], x[b][keep[b].long()])
                want = x[b].clone()
                want[keep[b].long()] = y[b]
                assert torch.equal(moved[b], want)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_drop_equals_gather_block_scatter_in_value_and_gradient(dtype, inplace):
    """L09: and every gradient has the dtype of its input."""
    B, T, C = 3, 10, 5
    g = torch.Generator().manual_seed(1)
    w, x0, dy = (torch.randn(*s, generator=g).to(dtype) for s in ((C, C), (B, T, C), (B, T, C)))
    for K in (1, 4, T - 1, T):
        keep, grads = keep_of(B, T, K), []
        for fused in (True, False):
            w1, leaf = w.clone().requires_grad_(), x0.clone().requires_grad_()
            x = leaf * 1                                    # the residual stream: a sum's result, which nobody saved
            block = lambda h: h + torch.tanh(h @ w1)
            out = ltd.drop(block, x, keep, inplace=inplace) if fused else ltd.scatter(x, block(ltd.gather(x, keep)), keep)
            (out * dy).sum().backward()
            grads.append((out.detach(), leaf.grad, w1.grad))
            assert leaf.grad.dtype == dtype
        for a, b in zip(*grads):
            assert torch.equal(a, b), (K, (a - b).abs().max())


def test_drop_passes_gradcheck_and_leaves_dropped_rows_alone():
    x, w = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True), torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    keep = keep_of(2, 6, 4)
    assert torch.autograd.gradcheck(lambda x, w: ltd.drop(lambda h: torch.sin(h @ w), x, keep), (x, w))
    out = ltd.drop(lambda h: h * 0, x, keep)
    gone = torch.ones(2, 6, dtype=bool).scatter(1, keep.long(), False)
    assert torch.equal(out[gone], x[gone]) and (out[~gone] == 0).all()
    dx, = torch.autograd.grad(out.sum(), x)
    assert (dx[gone] == 1).all() and (dx[~gone] == 0).all()


def test_drop_in_place_never_changes_a_leaf_or_the_incoming_gradient():
    x, keep = torch.randn(2, 6, 3, requires_grad=True), keep_of(2, 6, 2)
    before, dy = x.detach().clone(), torch.randn(2, 6, 3)
    dy0 = dy.clone()
    out = ltd.drop(lambda h: h * 2, x, keep, inplace=True)
    out.backward(dy)
    assert torch.equal(x, before) and torch.equal(dy, dy0)


def test_drop_in_place_on_a_saved_stream_raises_instead_of_lying():
    x = torch.randn(2, 6, 3, requires_grad=True).exp()          # exp saves its result for backward
    out = ltd.drop(lambda h: h * 2, x, keep_of(2, 6, 2), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_drop_saves_nothing_of_full_size():
    """Between forward and backward only indices are held: no saved tensor has B * T * C elements."""
    saved = []
    B, T, C, K = 2, 32, 8, 8
    x = torch.randn(B, T, C, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        ltd.drop(lambda h: h.sin(), x, keep_of(B, T, K), inplace=True)
    assert saved and max(math.prod(s) for s in saved) <= B * K * C, saved


@pytest.mark.parametrize("keep", [torch.zeros(2, 3, 4, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32),
                                  torch.zeros(2, 9, dtype=torch.int32)])
def test_drop_refuses_indices_of_the_wrong_shape(keep):
    with pytest.raises(ValueError, match="ltd.drop needs keep"):
        ltd.drop(lambda h: h, torch.zeros(2, 8, 4), keep)


def block_with_masked_keys(block, x, keep, cos=None, sin=None):
    """The whole block at full length and true positions, in which the dropped keys are masked out."""
    B, T, C = x.shape
    q, k, v = F.linear(block.ln_1(x), block.c_attn.weight).view(B, T, block.n_head, 3, -1).unbind(3)
    if cos is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    kept = torch.zeros(B, T, dtype=bool).scatter(1, keep.long(), True)
    mask = torch.ones(T, T, dtype=bool).tril()[None, None] & kept[:, None, None, :]
    mask = mask | torch.eye(T, dtype=bool)                  # a dropped query sees itself: no empty softmax; its row is not compared
    y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), attn_mask=mask)
    x = x + F.linear(y.transpose(1, 2).reshape(B, T, C), block.attn_proj.weight)
    return x + F.linear(F.gelu(F.linear(block.ln_2(x), block.c_fc.weight)), block.mlp_proj.weight), kept


@pytest.mark.parametrize("pos", ["learned", "rotary"])
@pytest.mark.parametrize("K", [1, 5, 23, 24])
def test_dropping_equals_masking_the_dropped_keys_at_true_positions(pos, K):
    B, T, C, H = 3, 24, 32, 4
    torch.manual_seed(0)
    block, x, keep = Block(C, H).double(), torch.randn(B, T, C, dtype=torch.float64), keep_of(B, T, K)
    table = [t.double() for t in rotary_table(T, C // H)] if pos == "rotary" else [None, None]
    want, kept = block_with_masked_keys(block, x, keep, *table)
    got = ltd.drop(block, x, keep, *table)
    assert torch.equal(got[~kept], x[~kept])
    # float64, and two orders of summation in the softmax
    torch.testing.assert_close(got[kept], want[kept], rtol=1e-12, atol=1e-12)


def test_importing_builds_nothing():
    """K04: no compiler, no folder, no CUDA call at import."""
    code = "import ltd, torch, sys; assert not torch.cuda.is_initialized(); assert 'torch.utils.cpp_extension' not in sys.modules; print('ok')"
    p = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PATH": "/nonexistent", "TORCH_EXTENSIONS_DIR": "/proc/none"}, capture_output=True, text=True)
    assert p.stdout == "ok\n", p.stderr


def test_tokenbypass_keeps_the_ids_of_highest_running_loss_by_position_where_equal():
    score = torch.tensor([0., 5, 1, 5, 2], dtype=torch.float64)
    keep = ltd.important(score, torch.tensor([[0, 1, 2, 3, 4, 1], [2, 2, 2, 2, 2, 2]]), 3, 2)
    assert keep.dtype == torch.int32 and keep.tolist() == [[[1, 3, 5]] * 2, [[0, 1, 2]] * 2]
    ltd.rescore(score, torch.tensor([[0., 8, 0, 3, 0], [0, 2, 0, 1, 0]], dtype=torch.float64))
    assert score.tolist() == pytest.approx([0, .9 * 5 + .1 * 4, 1, .9 * 5 + .1 * 3, 2])       # ids that did not come keep theirs


@pytest.mark.parametrize("layers", [range(0, 4), range(0, 3), range(1, 4)])
def test_any_run_of_layers_may_drop_and_keeping_all_tokens_changes_nothing(layers):
    torch.manual_seed(0)
    model, x = GPT(50, 16, 4, 2, 16, ltd_layers=layers), torch.randint(50, (3, 16))
    keep = ltd.draw(0, 0, torch.arange(3), layers, 16, 16)
    whole, kept = model(x, x), model(x, x, keep)
    assert whole.item() == kept.item()
    few = ltd.draw(0, 0, torch.arange(3), layers, 16, 5)
    model(x, x, few).backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in model.parameters())
