"""The Transformer in one file, with random layerwise token dropping as an input of forward(); GPT, BERT, ViT are ends.

One stack of blocks serves all three: a family says how its input becomes the residual stream (embed) and what is read
off it (read), and dropping, recompute, experts and parallelism know no family. Weights stay in float32; Linear and
LayerNorm cast them to the dtype of the activations, so that there is no autocast and the dtype is set in one place.

Papers: GPT-2; BERT: arXiv 1810.04805; ViT: arXiv 2010.11929; rotary positions: arXiv 2104.09864; dropping: arXiv
2211.11586. Trained by:  python train.py

B batch, T tokens, K kept tokens, C channels (n_embd), H heads, D head size (C / H), V vocabulary, P patch size.
"""
import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ltd

# name: (n_layer, n_embd, n_head, block_size, init_std); GPT-2's four, the GPT-3 list of arXiv 2005.14165, table 2.1,
# BERT's two and the ViTs of arXiv 2010.11929 and 2012.12877; the name's first part is the family, gpt where it is none
SIZES = {
    "gpt2":        (12, 768, 12, 1024, .02),   "gpt2-medium": (24, 1024, 16, 1024, .02),       # 124M, 350M
    "gpt2-large":  (36, 1280, 20, 1024, .02),  "gpt2-xl":     (48, 1600, 25, 1024, .02),       # 774M, 1.5B
    "gpt3-125m":   (12, 768, 12, 2048, .02),   "gpt3-350m":   (24, 1024, 16, 2048, .018),
    "gpt3-760m":   (24, 1536, 16, 2048, .015), "gpt3-1.3b":   (24, 2048, 16, 2048, .013),
    "gpt3-2.7b":   (32, 2560, 32, 2048, .011), "gpt3-6.7b":   (32, 4096, 32, 2048, .009),
    "gpt3-13b":    (40, 5120, 40, 2048, .008),
    "bert-base":   (12, 768, 12, 512, .02),    "bert-large":  (24, 1024, 16, 512, .02),        # 110M, 336M
    "vit-b16":     (12, 768, 12, 197, .02),    "vit-s16":     (12, 384, 6, 197, .02),          # 86M, 22M
    "vit-tiny":    (6, 64, 4, 65, .02),                                                        # 0.3M, for small images
}
IMAGES = {"vit-b16": (224, 16), "vit-s16": (224, 16), "vit-tiny": (32, 4)}     # image size, patch size


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
    """Attention and MLP, each inside a residual, with a LayerNorm before the branch (norm="pre") or behind the sum
    ("post", as BERT was published). Works on all T tokens or on K of them."""

    def __init__(self, n_embd, n_head, dropout=0.0, bias=False, gelu="none", moe=None, causal=True, norm="pre",
                 eps=1e-5):
        super().__init__()
        self.n_head, self.dropout, self.gelu, self.causal, self.post = n_head, dropout, gelu, causal, norm == "post"
        self.ln_1 = LayerNorm(n_embd, eps, bias=bias)
        self.c_attn = Linear(n_embd, 3 * n_embd, bias=bias)
        self.attn_proj = Linear(n_embd, n_embd, bias=bias)
        self.ln_2 = LayerNorm(n_embd, eps, bias=bias)
        self.moe = moe
        if moe is None:
            self.c_fc = Linear(n_embd, 4 * n_embd, bias=bias)
            self.mlp_proj = Linear(4 * n_embd, n_embd, bias=bias)

    def attend(self, x, cos, sin, mask):
        B, t, C = x.shape                                                        # t is T, or K in a dropped layer
        h = self.c_attn(x.view(B * t, C))                                        # (B*t, C) -> (B*t, 3C)
        # head by head, so that a slice of the weight's rows is whole heads: tensor parallelism cuts it, H is the rank's
        q, k, v = h.view(B, t, -1, 3, C // self.n_head).unbind(3)                # (B, t, H, D) three times
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)        # (B, H, t, D)
        if mask is not None:    # a row that kept padding alone sees all of it: no empty softmax, and nobody reads it
            mask = (mask | ~mask.any(1, keepdim=True))[:, None, None]            # (B, t) -> (B, 1, 1, t)
        # causal also on kept tokens: they are in order, so "the keys before me" are the kept ones before me
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, self.causal)
        return self.attn_proj(y.transpose(1, 2).reshape(B * t, -1)).view(B, t, C)    # (B, H, t, D) -> (B, t, C)

    def mlp(self, x):
        h = x.view(-1, x.size(2))                                                # (B, t, C) -> (B*t, C)
        if self.moe is not None:
            return self.moe(h).view_as(x)
        return self.mlp_proj(F.gelu(self.c_fc(h), approximate=self.gelu)).view_as(x)    # -> (B*t, 4C) -> (B, t, C)

    def forward(self, x, cos=None, sin=None, mask=None):
        """x: (B, t, C); cos, sin: (B or 1, t, D/2) or None; mask: (B, t) bool, False where a key is padding; None."""
        p = self.dropout if self.training else 0.0
        for ln, branch in ((self.ln_1, partial(self.attend, cos=cos, sin=sin, mask=mask)), (self.ln_2, self.mlp)):
            y = branch(x if self.post else ln(x))
            x = x + (F.dropout(y, p) if p else y)
            x = ln(x) if self.post else x
        return x


class Transformer(nn.Module):
    """What the families share. dtype: of the activations; the weights are float32. ltd_layers: the range of layers that
    token dropping applies to; all but the first and the last where nothing is said (2211.11586 section 3). ends: what
    the family's begin() and end() make its first and last modules of."""

    causal, eps = True, 1e-5

    def __init__(self, block_size, n_layer, n_head, n_embd, dropout=0.0, bias=False, pos="learned",
                 init_std=0.02, recompute="none", dtype=torch.float32, ltd_layers=None,
                 gelu="none", n_expert=0, expert_top_k=1, moe_every=2, moe_balance=0.01, moe_z=0.001, norm="pre",
                 **ends):
        super().__init__()
        if n_embd % n_head or (pos == "rotary" and n_embd // n_head % 2):
            raise ValueError(f"--n_embd={n_embd} must be a multiple of --n_head={n_head}, "
                             "with an even head size for --pos=rotary")
        if pos not in ("learned", "rotary") or gelu not in ("none", "tanh") or norm not in ("pre", "post"):
            raise ValueError(f"--pos={pos} must be learned or rotary, --gelu={gelu} none or tanh, and --norm={norm} "
                             "pre or post")
        self.block_size, self.n_embd, self.dropout, self.dtype = block_size, n_embd, dropout, dtype
        self.bias, self.gelu, self.norm, self.recompute = bias, gelu, norm, RECOMPUTE[recompute]
        self.ltd_layers = ltd_layers or range(1, n_layer - 1)
        self.begin(**ends)
        self.wpe = nn.Embedding(block_size, n_embd) if pos == "learned" else None
        self.blocks = nn.ModuleList(
            Block(n_embd, n_head, dropout, bias, gelu, MoE(n_embd, n_expert, expert_top_k, moe_balance, moe_z, gelu)
                  if i in moe_layers(n_layer, n_expert, moe_every) else None, self.causal, norm, self.eps)
            for i in range(n_layer))
        self.ln_f = LayerNorm(n_embd, self.eps, bias=bias) if norm == "pre" else None
        self.end(**ends)
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
        """tokens: what the family's embed() takes; for a pipeline's later stages what the one before made, (B, T, C).
        keep: (B, n, K) int from ltd.draw, or None. Returns what the family's read() does."""
        x, mask = self.embed(tokens)                                             # (B, T, C), (B, T) or None
        T = x.size(1)
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
                x = run(x, cos, sin, mask)
            else:
                x = ltd.drop(run, x, keep[:, i - self.ltd_layers.start], cos, sin, mask, inplace=True)
        if self.head is None:
            return x                                                             # to the next stage of a pipeline
        return self.read(x if self.ln_f is None else self.ln_f(x), targets, reduction)

    def fits(self, T):
        if T > self.block_size:
            raise ValueError(f"rows of {T} tokens do not fit --block_size={self.block_size}")

    def n_params(self):
        return sum(p.numel() for p in self.parameters())


class GPT(Transformer):
    """A causal language model. Targets: (B, T) int64, -1 = no loss there."""

    def __init__(self, vocab_size, *shape, **options):
        super().__init__(*shape, vocab_size=vocab_size, **options)

    def begin(self, vocab_size):
        self.wte = nn.Embedding(vocab_size, self.n_embd)

    def end(self, vocab_size):
        self.head = Linear(self.n_embd, vocab_size, bias=False)
        self.head.weight = self.wte.weight                                       # tied

    def embed(self, tokens):
        """tokens: (B, T) int. The same for a later stage of a pipeline, which has no embedding: its (B, T, C)."""
        self.fits(tokens.size(1))
        x = tokens if self.wte is None else self.wte(tokens)                     # (B, T) -> (B, T, C)
        return x if self.wpe is None else x + self.wpe.weight[:x.size(1)], None

    def read(self, x, targets, reduction):
        """With targets: the *sum* of the losses of all targets (float32 scalar), to be divided by their number in the
        global batch (reduction="none": the losses, (B*T,)). Without: the logits of the last position, (B, V)."""
        B, T, C = x.shape
        if targets is None:
            return self.head(x[:, -1])                                           # (B, C) -> (B, V)
        logits = self.head(x.view(B * T, C)).float()                             # (B, T, C) -> (B*T, V)
        return F.cross_entropy(logits, targets.reshape(-1), ignore_index=-1, reduction=reduction)

    @staticmethod
    def ends_flops(n_embd, T, vocab_size, **_):
        return 2 * vocab_size * n_embd * T

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


class BERT(Transformer):
    """A bidirectional encoder of rows [CLS] A [SEP] or [CLS] A [SEP] B [SEP]. n_labels = 0: a masked language model,
    with nsp=True also of whether B follows A; 1: regression, more: classification, from the row's [CLS]. padded=False
    says that no row has padding, so that attention needs no mask."""

    causal, eps = False, 1e-12

    def __init__(self, vocab_size, *shape, n_labels=0, nsp=False, padded=True, **options):
        super().__init__(*shape, vocab_size=vocab_size, n_labels=n_labels, nsp=nsp, **options)
        self.n_labels, self.padded = n_labels, padded

    def begin(self, vocab_size, n_labels, nsp):
        self.wte = nn.Embedding(vocab_size, self.n_embd)
        self.wse = nn.Embedding(2, self.n_embd)                                  # segments: A, B
        self.ln_0 = LayerNorm(self.n_embd, self.eps, bias=self.bias) if self.norm == "post" else None

    def end(self, vocab_size, n_labels, nsp):
        C = self.n_embd
        self.pooler = Linear(C, C) if n_labels or nsp else None                  # of [CLS], through a tanh
        self.pair_head = Linear(C, 2) if nsp else None
        self.transform = None if n_labels else nn.ModuleDict({"dense": Linear(C, C), "ln": LayerNorm(C, self.eps)})
        self.head = Linear(C, n_labels or vocab_size)
        if not n_labels:
            self.head.weight = self.wte.weight                                   # tied

    def embed(self, tokens):
        """tokens: (B, T, 2) int, ids (-1 = padding) and segments."""
        ids, segments = tokens.unbind(2)                                         # (B, T) twice
        self.fits(ids.size(1))
        x = self.wte(ids.clamp(min=0)) + self.wse(segments)                      # (B, T) -> (B, T, C)
        x = x if self.wpe is None else x + self.wpe.weight[:x.size(1)]
        return x if self.ln_0 is None else self.ln_0(x), ids >= 0 if self.padded else None

    def read(self, x, targets, reduction):
        """Masked language model: targets (B, T) int64, -1 = no loss, at [CLS] whether B follows A (0: it does); returns
        the summed loss, in which a row's sentence loss weighs as much as its masked tokens. Labels: (B,) int64, or
        float32 for regression; the summed loss. Without targets the logits, (B, T, V) or (B, n_labels)."""
        if self.n_labels:
            h = self.pooler(x[:, 0]).tanh()                                      # (B, T, C) -> (B, C)
            out = self.head(F.dropout(h, self.dropout, self.training)).float()   # (B, C) -> (B, n_labels)
            if targets is None:
                return out
            return (F.cross_entropy(out, targets, reduction=reduction) if self.n_labels > 1 else
                    F.mse_loss(out[:, 0], targets, reduction=reduction))
        loss = 0.0
        if targets is not None:
            if self.pair_head is not None:
                out = self.pair_head(self.pooler(x[:, 0]).tanh()).float()        # (B, C) -> (B, 2)
                masked = (targets[:, 1:] >= 0).sum(1)                            # (B,)
                loss = (F.cross_entropy(out, targets[:, 0], reduction="none") * masked).sum()
                targets = targets.index_fill(1, torch.zeros(1, dtype=torch.int64, device=x.device), -1)
            at = (targets >= 0).nonzero(as_tuple=True)
            x, targets = x[at], targets[at]                                      # (B, T, C) -> (M, C): a seventh
        h = self.transform["ln"](F.gelu(self.transform["dense"](x), approximate=self.gelu))
        logits = self.head(h).float()                                            # (M, C) -> (M, V)
        return logits if targets is None else loss + F.cross_entropy(logits, targets, reduction="sum")

    @staticmethod
    def ends_flops(n_embd, T, vocab_size, n_labels=0, mask_prob=0.15, **_):
        return 2 * n_embd * (n_embd + n_labels) if n_labels else 2 * n_embd * (n_embd + vocab_size) * mask_prob * T


class ViT(Transformer):
    """A classifier of images: patches as tokens behind a class token, whose place token dropping may drop as any."""

    causal, eps = False, 1e-12

    def __init__(self, n_labels, image_size, patch_size, *shape, channels=3, **options):
        if image_size % patch_size:
            raise ValueError(f"--image_size={image_size} must be a multiple of --patch_size={patch_size}")
        tokens = (image_size // patch_size) ** 2 + 1
        super().__init__(tokens, *shape, n_labels=n_labels, width=channels * patch_size**2, **options)
        self.image_size, self.patch_size, self.n_labels = image_size, patch_size, n_labels

    def begin(self, n_labels, width):
        self.patch = Linear(width, self.n_embd)
        self.cls = nn.Parameter(torch.empty(1, 1, self.n_embd))

    def end(self, n_labels, width):
        self.head = Linear(self.n_embd, n_labels)

    def embed(self, images):
        """images: (B, channels, h, w), uint8, or floating point from -1 to 1; of another size they are resized."""
        x, S, P = images, self.image_size, self.patch_size
        x = x if x.is_floating_point() else x.float() / 127.5 - 1
        if x.shape[2:] != (S, S):
            x = F.interpolate(x, (S, S), mode="bilinear", antialias=True)        # (B, c, h, w) -> (B, c, S, S)
        x = x.unfold(2, P, P).unfold(3, P, P).permute(0, 2, 3, 1, 4, 5)          # -> (B, S/P, S/P, c, P, P)
        x = self.patch(x.reshape(len(x), (S // P) ** 2, -1))                     # -> (B, T-1, c*P*P) -> (B, T-1, C)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1)                   # -> (B, T, C)
        return x if self.wpe is None else x + self.wpe.weight, None

    def read(self, x, targets, reduction):
        """targets: (B,) int64 labels; the summed loss ("none": (B,)). Without: the logits, (B, n_labels)."""
        logits = self.head(x[:, 0]).float()                                      # (B, T, C) -> (B, n_labels)
        return logits if targets is None else F.cross_entropy(logits, targets, reduction=reduction)

    @staticmethod
    def ends_flops(n_embd, T, n_labels, channels=3, patch_size=16, **_):
        return 2 * n_embd * (channels * patch_size**2 * (T - 1) + n_labels)


FAMILIES = {"gpt": GPT, "bert": BERT, "vit": ViT}


def moe_layers(n_layer, n_expert, moe_every):
    """The layers with experts: every moe_every-th one, from the moe_every-th on."""
    return range(moe_every - 1, n_layer, moe_every) if n_expert else range(0)


def forward_flops(n_layer, n_embd, ends, T, K=None, n_ltd=0, causal=True, moe=(0, 0), n_expert=0, expert_top_k=1):
    """FLOPs of the forward pass of one row of T tokens; the backward pass costs twice that. K: kept tokens of the n_ltd
    dropped layers. A layer on t rows: 24 C^2 t + 2 t^2 C (4 t^2 C if not causal). ends: of the first and last modules,
    from the family's ends_flops(); GPT's head: 2 V C T. Only what dropping leaves is counted, so that a utilisation
    computed from it is not flattered. moe: how many layers with experts see T and K tokens: one adds the router's
    2 E C t, and 16 C^2 t for every expert beyond a token's first."""
    def layer(t):
        return 24 * n_embd**2 * t + (2 if causal else 4) * t**2 * n_embd
    K = T if K is None else K
    experts = (2 * n_expert * n_embd + 16 * n_embd**2 * (expert_top_k - 1)) * (moe[0] * T + moe[1] * K)
    return (n_layer - n_ltd) * layer(T) + n_ltd * layer(K) + experts + ends
