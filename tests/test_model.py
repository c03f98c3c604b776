"""model.py: causality, initialisation, FLOPs against torch's own counter, recompute, dtypes, generation."""
import math

import pytest
import torch
import torch._dynamo.testing
from torch.utils.flop_counter import FlopCounterMode

import ltd
from model import GPT, SIZES, forward_flops


def make(**kw):
    torch.manual_seed(0)
    return GPT(**{**dict(vocab_size=97, block_size=32, n_layer=4, n_head=4, n_embd=32), **kw})


def batch(B=3, T=32, V=97):
    g = torch.Generator().manual_seed(1)
    return torch.randint(V, (B, T), generator=g), torch.randint(V, (B, T), generator=g)


def draw(m, B, T, K, step=0):
    return ltd.draw(5, step, torch.arange(B), m.ltd_layers, T, K)


@pytest.mark.parametrize("pos", ["learned", "rotary"])
@pytest.mark.parametrize("K", [None, 11])
def test_no_token_sees_the_future(pos, K):
    """The gradient of the loss at place i with respect to the embeddings behind i is exactly zero, dropped or not."""
    m = make(pos=pos)
    x, y = batch()
    keep = None if K is None else draw(m, 3, 32, K)
    for i in (0, 7, 30):
        labels = torch.full_like(y, -1)
        labels[:, i] = y[:, i]
        seen = []
        hook = m.wte.register_forward_hook(lambda mod, args, out: seen.append(out) or out.retain_grad())
        m(x, labels, keep).backward()
        hook.remove()
        assert (seen[0].grad[:, i + 1:] == 0).all() and seen[0].grad[:, i].abs().sum() > 0


def test_loss_is_the_sum_over_targets():
    m = make()
    x, y = batch()
    labels = y.clone()
    labels[:, 20:] = -1
    assert m(x, labels).item() == pytest.approx(m(x[:, :20], y[:, :20]).item(), rel=1e-5)        # float32 sums in another order


@pytest.mark.parametrize("K", [None, 9, 31])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recompute_changes_no_gradient(K, dropout):
    x, y = batch()
    grads = []
    for recompute in ("none", "block", "selective"):
        m = make(recompute=recompute, dropout=dropout, pos="rotary").train()
        torch.manual_seed(3)
        m(x, y, None if K is None else draw(m, 3, 32, K)).backward()
        grads.append([p.grad for p in m.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*grads))


@pytest.mark.parametrize("K", [1, 8, 31])
def test_keeping_all_or_evaluating_is_the_dense_model(K):
    m = make()
    x, y = batch()
    everything = torch.arange(32, dtype=torch.int32).expand(3, 2, 32)
    assert m(x, y, everything).item() == pytest.approx(m(x, y).item(), rel=1e-6)                 # the same sums, from a copy
    assert m(x, y, draw(m, 3, 32, K)).item() != m(x, y).item()


@pytest.mark.parametrize("K", [None, 64])
def test_flops_agree_with_torchs_counter(K):
    """Within 2 %. torch counts the whole attention square, so causal=False is the like for like."""
    m = make(vocab_size=512, block_size=256, n_layer=6, n_head=4, n_embd=128)
    x, y = batch(2, 256, 512)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        m(x, y, None if K is None else draw(m, 2, 256, K))
    ours = 2 * forward_flops(6, 128, GPT.ends_flops(128, 256, 512), 256, K, 4 if K else 0, causal=False)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("size,saving", [("gpt2", .288), ("gpt2-medium", .382), ("gpt3-1.3b", .410)])
def test_token_dropping_saves_the_published_share_of_flops(size, saving):
    """A linear ramp of K from T / 16 to T: 28.8, 38.2, 41.0 % (124M, 350M, 1.3B)."""
    n_layer, n_embd, _, T, _ = SIZES[size]
    ends = GPT.ends_flops(n_embd, T, 50257)
    ramp = [forward_flops(n_layer, n_embd, ends, T, K, n_layer - 2) for K in torch.linspace(T / 16, T, 1001).tolist()]
    assert 1 - sum(ramp) / 1001 / forward_flops(n_layer, n_embd, ends, T) == pytest.approx(saving, abs=.001)


@pytest.mark.parametrize("size,millions", [("gpt2", 124), ("gpt2-medium", 354), ("gpt3-1.3b", 1315)])
def test_named_sizes_have_the_known_number_of_parameters(size, millions):
    n_layer, n_embd, n_head, T, std = SIZES[size]
    with torch.device("meta"):
        m = GPT(50257, T, n_layer, n_head, n_embd, bias=True, init_std=std)
    assert m.n_params() / 1e6 == pytest.approx(millions, rel=.005)


def test_initialisation_is_gpt2s():
    m = make(vocab_size=500, n_embd=128, n_layer=8, bias=True)
    assert m.wte.weight.std().item() == pytest.approx(.02, rel=.02)          # 64,000 values: 2 % is 7 standard errors
    assert m.blocks[0].mlp_proj.weight.std().item() == pytest.approx(.02 / math.sqrt(16), rel=.02)
    assert m.blocks[0].c_attn.bias.abs().max() == 0 and m.head.weight is m.wte.weight
    assert m(*batch(V=97)).item() / 96 == pytest.approx(math.log(500), rel=.02)


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
def test_half_precision_keeps_float32_weights_and_a_near_loss(dtype, tolerance):
    """Tolerances: a few roundings of 8 or 11 bits of mantissa a layer."""
    x, y = batch()
    want, m = make()(x, y).item(), make(dtype=dtype)
    loss = m(x, y, draw(m, 3, 32, 8))
    loss.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in m.parameters())
    assert m(x, y).item() == pytest.approx(want, rel=tolerance)


@pytest.mark.parametrize("pos", ["learned", "rotary"])
def test_rotary_and_learned_positions_tell_places_apart(pos):
    m = make(pos=pos)
    x = torch.zeros(1, 8, dtype=torch.long)
    x[0, 0], other = 5, x.clone()
    other[0, 0], other[0, 3] = 0, 5
    assert not torch.allclose(m(x), m(other))


def test_compiled_model_equals_eager_with_two_graphs_for_all_kept_lengths():
    """L10: K varies over the run; the whole model is traced once static and once dynamic, no more."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    m, x, y = make(), *batch()
    compiled = torch.compile(m, backend=counter, fullgraph=True)
    for i, K in enumerate((4, 8, 12, 16, 20, 24, 28)):
        keep = draw(m, 3, 32, K, i)
        m.zero_grad()
        m(x, y, keep).backward()
        want = [p.grad.clone() for p in m.parameters()]
        m.zero_grad()
        compiled(x, y, keep).backward()
        for p, g in zip(m.parameters(), want):
            torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)         # float32, sums fused in another order
    assert counter.frame_count == 2


def test_generate_is_reproducible_and_greedy_takes_the_likeliest():
    m = make()
    start = torch.tensor([[1, 2, 3]])
    a, b = (m.generate(start, 40, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(a, b) and a.shape == (1, 43)                             # beyond block_size: the context slides
    greedy = m.generate(start, 1, temperature=0)
    assert greedy[0, -1] == m(start).argmax()
    assert torch.equal(m.generate(start, 5, top_k=1), m.generate(start, 5, temperature=0))


@pytest.mark.parametrize("kw,word", [(dict(n_embd=30), "n_head"), (dict(pos="alibi"), "rotary"), (dict(n_embd=12, pos="rotary"), "even")])
def test_impossible_shapes_are_refused(kw, word):
    with pytest.raises(ValueError, match=word):
        make(**kw)
    with pytest.raises(ValueError, match="block_size"):
        make()(torch.zeros(1, 33, dtype=torch.long))
