"""Random layerwise token dropping (random-LTD): the middle layers see only K of the T tokens of each row.

For every dropped layer each row draws K of its T positions, sorted; the whole block (attention, MLP, both residuals)
runs on those; the other tokens go round it unchanged. K grows over the run until nothing is dropped. Drawn afresh
for every layer, row and micro-batch; in training only. Order is kept, so causal attention needs no mask, but whatever
belongs to a position (rotary angles, padding masks, document ids) is gathered with the same indices.

Paper: arXiv 2211.11586 and 2212.03597 section 3.2. Run:  python train.py --ltd=25%..100%:70%

B batch, T tokens, K kept tokens, C channels, n dropped layers.
"""
import hashlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

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

    rows: (B,) int64, each row's place in the *global* batch; layers: n layer numbers (a sequence, or an int64 tensor).
    Uniform without replacement and independent for every (seed, step, layer, row). The key of a position is SplitMix64
    seeded by those four; the K smallest keys are kept, equal keys by position. So the result is the same on every
    device, under recompute, after a resume and for any number of ranks, and different on different data-parallel ranks.
    Cost: about 15 integer operations a position. Raises ValueError unless 1 <= K <= T <= 65,536.
    """
    if not 1 <= K <= T <= MAX_T:
        raise ValueError(f"ltd.draw needs 1 <= K <= T <= {MAX_T}, not K={K}, T={T}")
    return torch.ops.ltd.draw(seed, step, rows, torch.as_tensor(layers, dtype=torch.int64, device=rows.device), T, K)


def keys(seed, step, rows, layers, T):
    """The random 64 bits of every position: (B, n, T) int64, for draw()'s arguments. Numbers below 0 are no layers and
    free for other draws (masks of BERT, shifts of images), which are as reproducible by it as the kept tokens are."""
    dev = rows.device
    s = torch.full((1, 1), seed, dtype=torch.int64, device=dev)
    for word in (torch.tensor(step, device=dev), layers[None, :], rows[:, None]):
        s = mix(s + GOLDEN) ^ word                                          # (1, 1) -> (1, n) -> (B, n)
    s = mix(s + GOLDEN)
    return mix(s[..., None] + GOLDEN * torch.arange(1, T + 1, device=dev))  # (B, n, T)


def _draw(seed, step, rows, layers, T, K):
    position = torch.arange(T, dtype=torch.int64, device=rows.device)
    key = keys(seed, step, rows, layers, T)                                 # (B, n, T)
    key = (key >> 16 & 0xFFFFFFFF0000) | position                           # upper 32 bits, then the position: no ties
    kept = key.topk(K, dim=-1, largest=False, sorted=False).values & (MAX_T - 1)   # (B, n, K)
    return kept.sort(dim=-1).values.to(torch.int32)


def important(score, tokens, K, n):
    """TokenBypass's choice instead of a draw, a control (arXiv 2203.13240; compared in 2211.11586): the K tokens of
    each row whose ids have the highest running loss, by position where equal, the same for all n layers.

    score: (V,) from rescore(); tokens: (B, T) ids. Returns (B, n, K) int32, ascending along the last dimension."""
    best = score[tokens].argsort(dim=1, descending=True, stable=True)[:, :K]        # (B, T) -> (B, K)
    return best.sort(dim=1).values.to(torch.int32)[:, None].repeat(1, n, 1)         # (B, K) -> (B, n, K)


def rescore(score, sums, decay=0.9):
    """Move the running loss of every id that was a target in this step, in place. score: (V,) float64; sums: (2, V)
    float64: over the step's targets, each id's losses summed, and how often it came."""
    seen = (sums[1] > 0) & sums[0].isfinite()       # a step that blew up teaches nothing
    score[seen] = decay * score[seen] + (1 - decay) * sums[0, seen] / sums[1, seen]


# -----------------------------------------------------------------------------
# moving rows


def gather(x, keep):
    """x[b, keep[b]]: (B, T, C), (B, K) int32 -> (B, K, C). Differentiable; saves the indices only."""
    return torch.ops.ltd.gather(x.contiguous(), keep)


def scatter(x, y, keep):
    """A copy of x with row keep[b, k] of b replaced by y[b, k]: (B, T, C), (B, K, C), (B, K) int32 -> (B, T, C)."""
    return torch.ops.ltd.scatter(x.contiguous(), y.to(x.dtype).contiguous(), keep)


def _rows(x, keep):
    """(B, K) places within a row -> (B*K,) places in x.view(B*T, C)."""
    return (keep.long() + torch.arange(x.size(0), device=x.device)[:, None] * x.size(1)).view(-1)


def _gather(x, keep):
    return x.reshape(-1, x.size(2)).index_select(0, _rows(x, keep)).view(*keep.shape, x.size(2))  # -> (B, K, C)


def _scatter_(x, y, keep):
    x.view(-1, x.size(2)).index_copy_(0, _rows(x, keep), y.reshape(-1, x.size(2)))


def _scatter(x, y, keep):
    out = x.clone(memory_format=torch.contiguous_format)
    torch.ops.ltd.scatter_(out, y, keep)
    return out


# torch.ops.ltd.*: what is registered here is the torch path, for every device; the CUDA kernels take CUDA tensors over
# once they are loaded. Nothing of size (B, T, C) is saved for backward, and backward is the same two moves.
_library = torch.library.Library("ltd", "DEF")
for _schema, _function in (("draw(int seed, int step, Tensor rows, Tensor layers, int T, int K) -> Tensor", _draw),
                           ("gather(Tensor x, Tensor keep) -> Tensor", _gather),
                           ("scatter_(Tensor(a!) x, Tensor y, Tensor keep) -> ()", _scatter_),
                           ("scatter(Tensor x, Tensor y, Tensor keep) -> Tensor", _scatter)):
    _library.define(_schema)
    _library.impl(_schema[:_schema.index("(")], _function, "CompositeExplicitAutograd")


def _save_keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[-1])
    ctx.T = inputs[0].size(1)


def _gather_backward(ctx, dy):
    keep, = ctx.saved_tensors
    return scatter(dy.new_zeros(dy.size(0), ctx.T, dy.size(2)), dy, keep), None


def _scatter_backward(ctx, dout):
    keep, = ctx.saved_tensors
    return scatter(dout, dout.new_zeros(*keep.shape, dout.size(2)), keep), gather(dout, keep), None


torch.library.register_autograd("ltd::gather", _gather_backward, setup_context=_save_keep)
torch.library.register_autograd("ltd::scatter", _scatter_backward, setup_context=_save_keep)
torch.library.register_fake("ltd::draw", lambda seed, step, rows, layers, T, K:
                            rows.new_empty(rows.size(0), layers.size(0), K, dtype=torch.int32))
torch.library.register_fake("ltd::gather", lambda x, keep: x.new_empty(*keep.shape, x.size(2)))
torch.library.register_fake("ltd::scatter", lambda x, y, keep: x.new_empty(x.shape))
torch.library.register_fake("ltd::scatter_", lambda x, y, keep: None)


# The two functions below are one pair, used by drop() alone. Written as gather and scatter, autograd would fill a zero
# tensor of (B, T, C), add it to another, and copy the stream forward: four times the traffic. As a pair, the forward
# pass moves 4K rows: the stream x is passed along as the same tensor and y written into it. Backward is the same
# two moves: _Put hands the incoming gradient on whole and gathers dy from it; _Take then overwrites the kept rows with
# dx. So _Put's gradient for x is right only because _Take comes behind it. Nothing of size (B, T, C) is saved.
# Writing into x is safe where nobody saved x for backward: it is the sum that ended the block before, and a sum saves
# nothing; should somebody have saved it, autograd's version counter raises an error instead of giving a wrong gradient.


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keep):
        ctx.save_for_backward(keep)
        ctx.mark_dirty(x)                       # "changed in place": so x itself may be returned as an output
        return x, torch.ops.ltd.gather(x, keep)                                # (B, T, C) -> (B, K, C)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx, dtaken):
        keep, = ctx.saved_tensors
        dx = dx.clone(memory_format=torch.contiguous_format)    # the incoming gradient is not ours to change
        torch.ops.ltd.scatter_(dx, dtaken.contiguous(), keep)
        return dx, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, keep):
        ctx.save_for_backward(keep)
        ctx.mark_dirty(x)
        torch.ops.ltd.scatter_(x, y.contiguous(), keep)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx):
        keep, = ctx.saved_tensors
        return dx, torch.ops.ltd.gather(dx.contiguous(), keep), None


def drop(block, x, keep, *per_token, inplace=False):
    """Run `block` on the kept tokens only: x with rows keep[b] replaced by block(x[b, keep[b]], ...).

    x: (B, T, C); keep: (B, K) int, ascending, 1 <= K <= T; returns (B, T, C). per_token: tensors (B or 1, T, ...) that
    belong to positions (rotary angles, masks), gathered with the same indices and handed to the block; None stays None.
    inplace=True writes into x and saves a copy of it: only for a caller that will not read x again (see above).
    Raises ValueError where shapes do not fit; that the indices are in range is draw()'s promise.
    """
    B, T, C = x.shape
    if keep.dim() != 2 or keep.size(0) != B or not 1 <= keep.size(1) <= T:
        raise ValueError(f"ltd.drop needs keep of shape ({B}, K) with 1 <= K <= {T}, not {tuple(keep.shape)}")
    keep, where = keep.to(torch.int32).contiguous(), keep.long()
    batch = torch.arange(B, device=x.device)[:, None]                          # (B, 1)
    extra = [p if p is None else p[0, where] if p.size(0) == 1 else p[batch, where] for p in per_token]   # (B, K, ...)
    if torch.compiler.is_compiling():
        if _loaded:
            return scatter(x, block(gather(x, keep), *extra), keep)
        # without our kernel let inductor fuse the plain pair with what stands around it
        wide = where[..., None].expand(-1, -1, C)                              # (B, K) -> (B, K, C), a view
        return x.scatter(1, wide, block(x.gather(1, wide), *extra).to(x.dtype))
    # not ours to write into: a leaf, or a view, as the first layer of a pipeline's stage gets it
    if not inplace or not x.is_contiguous() or x._is_view() or (x.is_leaf and x.requires_grad):
        x = x.clone(memory_format=torch.contiguous_format)
    x, taken = _Take.apply(x, keep)
    return _Put.apply(x, block(taken, *extra).to(x.dtype), keep)


# -----------------------------------------------------------------------------
# the CUDA kernel, built at first use

_loaded = ""        # what load_kernel() loaded: "CUDA kernel (sm_90)", or nothing


def _build(source, target, arch, verbose=False):
    """Compile `source` for `arch` ("9.0", or several: "8.0;9.0") and rename the library to `target`. Built in a folder
    of its own, so that neither a killed build nor torch's own lock file can stand in the way of the next one."""
    from torch.utils import cpp_extension
    old = {k: os.environ.get(k) for k in ("TORCH_CUDA_ARCH_LIST", "MAX_JOBS")}
    work = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent))
    os.environ.update(TORCH_CUDA_ARCH_LIST=arch, MAX_JOBS=old["MAX_JOBS"] or "2")
    try:
        cpp_extension.load(target.stem, [str(source)], build_directory=str(work), is_python_module=False,
                           with_cuda=True, verbose=verbose, extra_cflags=["-O2", "-DUSE_CUDA"],
                           extra_cuda_cflags=["-O3", "-DUSE_CUDA", "-Xptxas=-v"])
        os.replace(work / f"{target.stem}.so", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        for k, v in old.items():
            os.environ.pop(k) if v is None else os.environ.update({k: v})


def library_path(source, arch):
    """Where the library for this torch, CUDA, Python, architecture and source lies: each combination has its own."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path("~/.cache/torch_extensions").expanduser()
    key = f"{torch.__version__} {torch.version.cuda} {sys.version_info[:2]} {arch}".encode() + Path(source).read_bytes()
    return Path(root) / "winnow" / f"ltd_{hashlib.sha256(key).hexdigest()[:16]}.so"


def build_and_load(source, arch, timeout=180):
    """Load the library, building it first where it is missing: one process builds, all others (ranks, other runs) wait
    for it with a timeout. The lock is the kernel's (flock), so that it ends with its holder, killed or not."""
    import fcntl
    target, start, built = library_path(source, arch), time.time(), False
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.time() - start > timeout:
                        raise RuntimeError(f"another process has been building for {timeout} s; "
                                           f"its lock is {lock.name}") from None
                    time.sleep(0.2)
            if not target.is_file():
                for stale in target.parent.glob("build-*"):         # of killed builds: we hold the lock
                    shutil.rmtree(stale, ignore_errors=True)
                _build(source, target, arch)
                built = True
    if not built:                       # the build has loaded what it built
        torch.ops.load_library(str(target))
    return time.time() - start


def load_kernel(mode="auto", device="cuda"):
    """Choose how torch.ops.ltd.* work on CUDA tensors; returns one line that says what and why. mode: auto (the kernel
    where it can be built, else torch), cuda (the kernel, or ValueError), torch. Nothing is built before this call."""
    global _loaded
    if mode not in ("auto", "cuda", "torch"):
        raise ValueError(f"--ltd_kernel={mode} is unknown; it takes auto, cuda or torch")
    if mode == "torch" or _loaded:
        return _loaded or "torch path (asked for)"
    try:
        if not str(device).startswith("cuda") or not torch.cuda.is_available():
            raise RuntimeError("no GPU")
        major, minor = torch.cuda.get_device_capability(device)
        seconds = build_and_load(Path(__file__).with_name("ltd_kernel.cu"), f"{major}.{minor}")
        _loaded = f"CUDA kernel (sm_{major}{minor})"
        return f"{_loaded}, ready in {seconds:.1f} s"
    except Exception as e:      # no toolkit, compiler, ninja, writable folder, another CUDA: each has its own exception
        why = " ".join(str(e).split())[:200] or type(e).__name__
        if mode == "cuda":
            raise ValueError(f"--ltd_kernel=cuda: the CUDA kernel cannot be had: {why}; "
                             "mend that, or give --ltd_kernel=torch") from e
        return f"torch path ({why})"
