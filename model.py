"""The Transformer: a causal GPT in one file, with random layerwise token dropping as an input of forward().

Pre-norm blocks, learned or rotary positions, tied head, GPT-2's initialisation. Weights stay in float32; Linear and
LayerNorm cast them to the dtype of the activations, so that there is no autocast and the dtype is set in one place.

Papers: GPT-2; rotary positions: arXiv 2104.09864; dropping: arXiv 2211.11586. Trained by:  python train.py

B batch, T tokens, K kept tokens, C channels (n_embd), H heads, D head size (C / H), V vocabulary.
"""
import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ltd

# name: (n_layer, n_embd, n_head, block_size, init_std); GPT-2's four and the GPT-3 list of arXiv 2005.14165, table 2.1
SIZES = {
    "gpt2":        (12, 768, 12, 1024, .02),   "gpt2-medium": (24, 1024, 16, 1024, .02),       # 124M, 350M
    "gpt2-large":  (36, 1280, 20, 1024, .02),  "gpt2-xl":     (48, 1600, 25, 1024, .02),       # 774M, 1.5B
    "gpt3-125m":   (12, 768, 12, 2048, .02),   "gpt3-350m":   (24, 1024, 16, 2048, .018),
    "gpt3-760m":   (24, 1536, 16, 2048, .015), "gpt3-1.3b":   (24, 2048, 16, 2048, .013),
    "gpt3-2.7b":   (32, 2560, 32, 2048, .011), "gpt3-6.7b":   (32, 4096, 32, 2048, .009),
    "gpt3-13b":    (40, 5120, 40, 2048, .008),
}


class Linear(nn.Linear):
    """nn.Linear with float32 weights that works in the dtype of its input."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm with float32 weights that works in the dtype of its input (sums are float32 inside)."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype),
                            None if self.bias is None else self.bias.to(x.dtype), self.eps)


def keep_products(ctx, op, *args, **kwargs):
    """What --recompute=selective keeps: matrix products, attention, and what came from other ranks. The cheap rest,
    norms, GELU, casts and sums, is computed again: most of the memory for little of the time (arXiv 2205.05198)."""
    name = str(op).split(".")[1]
    kept = name in ("mm", "addmm", "all_reduce", "wait_tensor") or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


RECOMPUTE = {"none": None, "block": {}, "selective": {
    "context_fn": partial(create_selective_checkpoint_contexts, keep_products)}}


def rotary_table(T, D, base=10000.0):
    """cos and sin of every position: two float32 tensors (1, T, D/2)."""
    angle = torch.arange(T)[:, None] * base ** (-torch.arange(0, D, 2) / D)      # (T, 1) * (D/2,) -> (T, D/2)
    return angle.cos()[None], angle.sin()[None]


def rotate(x, cos, sin):
    """Rotate the two halves of each head by its position's angle. x: (B, t, H, D); cos, sin: (B or 1, t, D/2)."""
    cos, sin = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype)          # (B, t, 1, D/2)
    a, b = x.chunk(2, dim=-1)                                                    # (B, t, H, D/2) twice
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class _Aux(torch.autograd.Function):
    """x as it is; on the way back the auxiliary loss gets the gradient `scale`. So it needs no way out of the block,
    and recompute, pipelines and the reported loss know nothing of it."""

    @staticmethod
    def forward(ctx, x, aux, scale):
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        scale, = ctx.saved_tensors
        return grad, scale, None


class MoE(nn.Module):
    """A mixture of experts instead of the MLP: each token runs through the top_k of n_expert MLPs that a linear router
    finds likeliest, weighted by their probabilities (top_k > 1: made to sum to 1). None is dropped for want of room.

    Two auxiliary losses, means over a micro-batch's tokens: balance, n_expert * sum_i f_i P_i, where f_i is the share
    of assignments that expert i got and P_i its mean probability (Switch, arXiv 2101.03961 eq 4 to 6); and z, the mean
    squared logsumexp of the router's logits (ST-MoE, arXiv 2202.08906 eq 5). Experts have no biases.
    """

    def __init__(self, n_embd, n_expert, top_k=1, balance=0.01, z=0.001, gelu="none"):
        super().__init__()
        self.n_expert, self.top_k, self.balance, self.z, self.gelu = n_expert, top_k, balance, z, gelu
        self.router = Linear(n_embd, n_expert, bias=False)
        self.fc = nn.Parameter(torch.empty(n_expert, 4 * n_embd, n_embd))
        self.proj = nn.Parameter(torch.empty(n_expert, n_embd, 4 * n_embd))
        # what a micro-batch's auxiliary loss weighs, set by the loop; and the tokens that each expert got
        self.register_buffer("aux_scale", torch.zeros(()), persistent=False)
        self.register_buffer("load", torch.zeros(n_expert), persistent=False)

    def forward(self, x):
        N, C = x.shape
        logits = self.router(x.to(torch.promote_types(x.dtype, torch.float32)))  # (N, C) -> (N, E), not in halves
        p = logits.softmax(-1)
        weight, expert = p.topk(self.top_k)                                      # (N, k) twice
        if self.top_k > 1:
            weight = weight / weight.sum(-1, keepdim=True)
        order = expert.view(-1).argsort(stable=True)                             # (N*k,) assignments, expert by expert
        count = torch.bincount(expert.view(-1), minlength=self.n_expert)         # (E,)
        token = order // self.top_k
        # one product an expert, over its own tokens; reading the counts costs a GPU a sync
        # unbind, not an index: the backward pass of an index fills a zero of all experts' size
        parts = zip(x[token].split(count.tolist()), self.fc.unbind(), self.proj.unbind())
        h = [F.linear(F.gelu(F.linear(part, fc.to(x.dtype)), approximate=self.gelu), proj.to(x.dtype))
             for part, fc, proj in parts]                                        # (n_i, C) -> (n_i, 4C) -> (n_i, C)
        y = torch.cat(h) * weight.view(-1)[order, None].to(x.dtype)              # (N*k, C)
        y = torch.zeros_like(x).index_add(0, token, y)                           # (N*k, C) -> (N, C)
        if self.training:
            self.load += count
            balance = self.n_expert * (count.to(p.dtype) / (N * self.top_k) * p.mean(0)).sum()
            aux = self.balance * balance + self.z * logits.logsumexp(-1).square().mean()
            y = _Aux.apply(y, aux, self.aux_scale)
        return y


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and inside a residual. Works on all T tokens or on K of them."""

    def __init__(self, n_embd, n_head, dropout=0.0, bias=False, gelu="none", moe=None):
        super().__init__()
        self.n_head, self.dropout, self.gelu = n_head, dropout, gelu
        self.ln_1 = LayerNorm(n_embd, bias=bias)
        self.c_attn = Linear(n_embd, 3 * n_embd, bias=bias)
        self.attn_proj = Linear(n_embd, n_embd, bias=bias)
        self.ln_2 = LayerNorm(n_embd, bias=bias)
        self.moe = moe
        if moe is None:
            self.c_fc = Linear(n_embd, 4 * n_embd, bias=bias)
            self.mlp_proj = Linear(4 * n_embd, n_embd, bias=bias)

    def mlp(self, x):
        return self.mlp_proj(F.gelu(self.c_fc(x), approximate=self.gelu))        # (B*t, C) -> (B*t, 4C) -> (B*t, C)

    def forward(self, x, cos=None, sin=None):
        B, t, C = x.shape                                                        # t is T, or K in a dropped layer
        p = self.dropout if self.training else 0.0
        h = self.c_attn(self.ln_1(x).view(B * t, C))                             # (B*t, C) -> (B*t, 3C)
        # head by head, so that a slice of the weight's rows is whole heads: tensor parallelism cuts it, H is the rank's
        q, k, v = h.view(B, t, -1, 3, C // self.n_head).unbind(3)                # (B, t, H, D) three times
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)        # (B, H, t, D)
        # causal also on kept tokens: they are in order, so "the keys before me" are the kept ones before me
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = self.attn_proj(y.transpose(1, 2).reshape(B * t, -1)).view(B, t, C)   # (B, H, t, D) -> (B, t, C)
        x = x + (F.dropout(y, p) if p else y)
        y = (self.moe or self.mlp)(self.ln_2(x).view(B * t, C)).view(B, t, C)
        return x + (F.dropout(y, p) if p else y)


class GPT(nn.Module):
    """A causal language model. dtype: of the activations; the weights are float32. ltd_layers: the range of layers that
    token dropping applies to; all but the first and the last where nothing is said (2211.11586 section 3)."""

    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd, dropout=0.0, bias=False, pos="learned",
                 init_std=0.02, recompute="none", dtype=torch.float32, ltd_layers=None,
                 gelu="none", n_expert=0, expert_top_k=1, moe_every=2, moe_balance=0.01, moe_z=0.001):
        super().__init__()
        if n_embd % n_head or (pos == "rotary" and n_embd // n_head % 2):
            raise ValueError(f"--n_embd={n_embd} must be a multiple of --n_head={n_head}, "
                             "with an even head size for --pos=rotary")
        if pos not in ("learned", "rotary") or gelu not in ("none", "tanh"):
            raise ValueError(f"--pos={pos} must be learned or rotary, and --gelu={gelu} none or tanh")
        self.block_size, self.dropout, self.recompute, self.dtype = block_size, dropout, RECOMPUTE[recompute], dtype
        self.ltd_layers = ltd_layers or range(1, n_layer - 1)
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd) if pos == "learned" else None
        self.blocks = nn.ModuleList(
            Block(n_embd, n_head, dropout, bias, gelu, MoE(n_embd, n_expert, expert_top_k, moe_balance, moe_z, gelu)
                  if i in moe_layers(n_layer, n_expert, moe_every) else None) for i in range(n_layer))
        self.ln_f = LayerNorm(n_embd, bias=bias)
        self.head = Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.wte.weight                                       # tied
        self.rotary = pos == "rotary"
        if self.rotary:
            for name, table in zip(("cos", "sin"), rotary_table(block_size, n_embd // n_head)):
                self.register_buffer(name, table, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:     # GPT-2: what writes into the residual stream is scaled down by the number of writers
                nn.init.normal_(p, std=init_std / math.sqrt(2 * n_layer)
                                if name.endswith(("_proj.weight", "moe.proj")) else init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets=None, keep=None, reduction="sum"):
        """tokens: (B, T) int; for a pipeline's later stages what the one before made, (B, T, C). targets: (B, T) int64,
        -1 = no loss there. keep: (B, n, K) int from ltd.draw, or None.

        With targets: the *sum* of the losses of all targets (float32 scalar), to be divided by their number in the
        global batch (reduction="none": the losses, (B*T,)). Without: the logits of the last position, (B, V).
        """
        B, T = tokens.shape[:2]
        if T > self.block_size:
            raise ValueError(f"rows of {T} tokens do not fit --block_size={self.block_size}")
        x = tokens if self.wte is None else self.wte(tokens)                     # (B, T) -> (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe.weight[:T]
        cos, sin = (self.cos[:, :T], self.sin[:, :T]) if self.rotary else (None, None)   # (1, T, D/2)
        x = x.to(self.dtype)
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        for i, block in enumerate(self.blocks):
            if block is None:                                                    # of another stage of a pipeline
                continue
            # recompute wraps the block on the kept tokens, inside the drop: it stores (B, K, C), needs no second draw
            run = block
            if self.recompute is not None and self.training:
                run = partial(checkpoint, block, use_reentrant=False, **self.recompute)
            if keep is None or i not in self.ltd_layers:
                x = run(x, cos, sin)
            else:
                x = ltd.drop(run, x, keep[:, i - self.ltd_layers.start], cos, sin, inplace=True)
        if self.head is None:
            return x                                                             # to the next stage of a pipeline
        x = self.ln_f(x)
        if targets is None:
            return self.head(x[:, -1])                                           # (B, C) -> (B, V)
        logits = self.head(x.view(B * T, -1)).float()                            # (B, T, C) -> (B*T, V)
        return F.cross_entropy(logits, targets.reshape(-1), ignore_index=-1, reduction=reduction)

    def n_params(self):
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Append max_new_tokens sampled tokens to tokens (B, T) int64; temperature 0 takes the likeliest. The context
        is cut to the last block_size tokens. Recomputes it for each token: plain, and fast enough for samples."""
        was_training = self.training
        self.eval()
        for _ in range(max_new_tokens):
            # forward() itself, not the call: a compiled model would be compiled anew for every length
            logits = self.forward(tokens[:, -self.block_size:]).float()          # (B, V)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)                            # (B, 1)
            else:
                logits = logits / temperature
                if top_k:
                    logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = -math.inf
                new = torch.multinomial(logits.softmax(-1), 1, generator=generator)   # (B, 1)
            tokens = torch.cat((tokens, new), dim=1)
        self.train(was_training)
        return tokens


def moe_layers(n_layer, n_expert, moe_every):
    """The layers with experts: every moe_every-th one, from the moe_every-th on."""
    return range(moe_every - 1, n_layer, moe_every) if n_expert else range(0)


def forward_flops(n_layer, n_embd, vocab_size, T, K=None, n_ltd=0, causal=True, moe=(0, 0), n_expert=0, expert_top_k=1):
    """FLOPs of the forward pass of one row of T tokens; the backward pass costs twice that. K: kept tokens of the n_ltd
    dropped layers. A layer on t rows: 24 C^2 t + 2 t^2 C (4 t^2 C if not causal); the head: 2 V C T. Only what
    dropping leaves is counted, so that a utilisation computed from it is not flattered. moe: how many layers with
    experts see T and K tokens: one adds the router's 2 E C t, and 16 C^2 t for every expert beyond a token's first."""
    def layer(t):
        return 24 * n_embd**2 * t + (2 if causal else 4) * t**2 * n_embd
    K = T if K is None else K
    experts = (2 * n_expert * n_embd + 16 * n_embd**2 * (expert_top_k - 1)) * (moe[0] * T + moe[1] * K)
    return (n_layer - n_ltd) * layer(T) + n_ltd * layer(K) + experts + 2 * vocab_size * n_embd * T
