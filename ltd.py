"""Random layerwise token dropping (random-LTD): the middle layers see only K of the T tokens of each row.

For every dropped layer each row draws K of its T positions, sorted; the whole block (attention, MLP, both residuals)
runs on those; the other tokens go round it unchanged. K grows over the run until nothing is dropped. Drawn afresh
for every layer, row and micro-batch; in training only. Order is kept, so causal attention needs no mask, but whatever
belongs to a position (rotary angles, padding masks, document ids) is gathered with the same indices.

Paper: arXiv 2211.11586 and 2212.03597 section 3.2. Run:  python train.py --ltd=25%..100%:70%

B batch, T tokens, K kept tokens, C channels, n dropped layers.
"""
import torch

# -----------------------------------------------------------------------------
# the draw: a counter-based hash, no generator, no state

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)     # SplitMix64's increment and multipliers, as the signed integers torch has
MUL1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MUL2 = 0x94D049BB133111EB - (1 << 64)
MAX_T = 1 << 16                             # a position is packed into the low 16 bits of a key


def mix(z):
    """SplitMix64's finaliser: int64 -> int64, a bijection in which every bit depends on every bit. Overflow wraps;
    the masks turn torch's arithmetic shift into the logical one."""
    z = (z ^ (z >> 30 & 0x3FFFFFFFF)) * MUL1
    z = (z ^ (z >> 27 & 0x1FFFFFFFFF)) * MUL2
    return z ^ (z >> 31 & 0x1FFFFFFFF)


def draw(seed, step, rows, layers, T, K):
    """Kept positions of one micro-batch for all dropped layers: (B, n, K) int32, ascending along the last dimension.

    rows: (B,) int64, each row's place in the *global* batch; layers: n layer numbers. Uniform without replacement and
    independent for every (seed, step, layer, row). The key of a position is SplitMix64 seeded by those four; the K
    smallest keys are kept, equal keys by position. So the result is the same on every device, under recompute, after a
    resume and for any number of ranks, and different on different data-parallel ranks. Cost: about 15 integer
    operations a position. Raises ValueError unless 1 <= K <= T <= 65,536.
    """
    if not 1 <= K <= T <= MAX_T:
        raise ValueError(f"ltd.draw needs 1 <= K <= T <= {MAX_T}, not K={K}, T={T}")
    dev = rows.device
    layers = torch.as_tensor(layers, dtype=torch.int64, device=dev)
    s = torch.full((1, 1), seed, dtype=torch.int64, device=dev)
    for word in (torch.tensor(step, device=dev), layers[None, :], rows[:, None]):
        s = mix(s + GOLDEN) ^ word                                          # (1, 1) -> (1, n) -> (B, n)
    s = mix(s + GOLDEN)
    position = torch.arange(T, dtype=torch.int64, device=dev)
    key = mix(s[..., None] + GOLDEN * (position + 1))                       # (B, n, T)
    key = (key >> 16 & 0xFFFFFFFF0000) | position                           # the upper 32 bits, then the position: no two are equal
    kept = key.topk(K, dim=-1, largest=False, sorted=False).values & (MAX_T - 1)   # (B, n, K)
    return kept.sort(dim=-1).values.to(torch.int32)


# -----------------------------------------------------------------------------
# moving rows


def gather(x, keep):
    """x[b, keep[b]]: (B, T, C), (B, K) -> (B, K, C). Differentiable; saves the indices only."""
    return x.gather(1, keep.long()[..., None].expand(-1, -1, x.size(2)))


def scatter(x, y, keep):
    """A copy of x with row keep[b, k] of b replaced by y[b, k]: (B, T, C), (B, K, C), (B, K) -> (B, T, C)."""
    return x.scatter(1, keep.long()[..., None].expand(-1, -1, x.size(2)), y.to(x.dtype))


# The two functions below are one pair, used by drop() alone. Written as gather and scatter, autograd would fill a zero
# tensor of (B, T, C), add it to another, and copy the stream forward: four times the traffic. As a pair, the forward pass
# moves 4K rows: the stream x is passed along as the same tensor and y written into it. The backward pass is the same
# two moves: _Put hands the incoming gradient on whole and gathers dy from it; _Take then overwrites the kept rows with
# dx. So _Put's gradient for x is right only because _Take comes behind it. Nothing of size (B, T, C) is saved.
# Writing into x is safe where nobody saved x for backward: it is the sum that ended the block before, and a sum saves
# nothing; should somebody have saved it, autograd's version counter raises an error instead of giving a wrong gradient.


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, shape):
        ctx.save_for_backward(rows)
        ctx.mark_dirty(x)                       # "changed in place": so x itself may be returned as an output
        return x, x.view(-1, x.size(-1)).index_select(0, rows).view(shape)      # (B*T, C) -> (B, K, C)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx, dtaken):
        rows, = ctx.saved_tensors
        dx = dx.clone(memory_format=torch.contiguous_format)    # the incoming gradient is not ours to change
        dx.view(-1, dx.size(-1)).index_copy_(0, rows, dtaken.reshape(-1, dx.size(-1)))
        return dx, None, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, rows):
        ctx.save_for_backward(rows)
        ctx.mark_dirty(x)
        ctx.shape = y.shape
        x.view(-1, x.size(-1)).index_copy_(0, rows, y.reshape(-1, x.size(-1)))
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx):
        rows, = ctx.saved_tensors
        return dx, dx.reshape(-1, dx.size(-1)).index_select(0, rows).view(ctx.shape), None


def drop(block, x, keep, *per_token, inplace=False):
    """Run `block` on the kept tokens only: x with rows keep[b] replaced by block(x[b, keep[b]], ...).

    x: (B, T, C); keep: (B, K) int, ascending, 1 <= K <= T; returns (B, T, C). per_token: tensors (B or 1, T, ...) that
    belong to positions (rotary angles, masks), gathered with the same indices and handed to the block; None stays None.
    inplace=True writes into x and saves a copy of it: only for a caller that will not read x again (see the note above).
    Raises ValueError where shapes do not fit; that the indices are in range is draw()'s promise.
    """
    B, T, C = x.shape
    if keep.dim() != 2 or keep.size(0) != B or not 1 <= keep.size(1) <= T:
        raise ValueError(f"ltd.drop needs keep of shape ({B}, K) with 1 <= K <= {T}, not {tuple(keep.shape)}")
    keep = keep.long()
    batch = torch.arange(B, device=x.device)[:, None]                          # (B, 1)
    extra = [p if p is None else p[0, keep] if p.size(0) == 1 else p[batch, keep] for p in per_token]   # (B, K, ...)
    if torch.compiler.is_compiling():       # inductor fuses the plain pair with what stands around it
        return scatter(x, block(gather(x, keep), *extra), keep)
    rows = (keep + batch * T).view(-1)                                         # (B, K) -> (B*K,) rows of (B*T, C)
    if not inplace or not x.is_contiguous() or (x.is_leaf and x.requires_grad):
        x = x.clone(memory_format=torch.contiguous_format)
    x, taken = _Take.apply(x, rows, (B, keep.size(1), C))
    return _Put.apply(x, block(taken, *extra).to(x.dtype), rows)
