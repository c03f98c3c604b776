"""Which rank holds and computes what: PyTorch's engines behind one class, so that the loop has no branch for any.

    --parallel=ddp      every rank holds everything (DistributedDataParallel)
    --parallel=zero1    optimizer state is sharded; gradients are summed once a step
    --parallel=zero2    gradients too: they are summed and sharded after every micro-batch
    --parallel=zero3    weights too: gathered layer by layer where they are needed, forward and backward
    --tp=N              N ranks share every layer: heads and MLP channels are cut (tensor parallelism)
    --pp=N              N ranks hold a part of the layers each (pipeline): --pp_schedule=gpipe, 1f1b or interleaved
    --offload=cpu       shards wait in the host's memory between uses; disk:FOLDER keeps AdamW's moments in files

They multiply: ranks = pp x dp x tp, tensor parallelism inside, so that its ranks are neighbours. zero1 to zero3, tp
and pp stand on FSDP2 (torch.distributed.fsdp.fully_shard) with the switches set to what the names mean; between steps
it shards the weights under all three, so each is at least what it says; a pipeline's stage, though, sums gradients
once a step under all. Names and savings: "ZeRO", arXiv 1910.02054 section 5; tp: "Megatron-LM", arXiv 1909.08053
section 3; pp: GPipe, arXiv 1811.06965, 1F1B: arXiv 2104.04473.
"""
import contextlib
import copy
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ENGINES = ("ddp", "zero1", "zero2", "zero3")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
STAGES = 2                                      # of the interleaved schedule on every rank
# how tensor parallelism cuts a block: c_attn and c_fc by output, so that a rank has whole heads and whole channels of
# the MLP; what follows them by input, and the sum over ranks is the one message of each. The rest is whole on all
CUT_BY_OUTPUT, CUT_BY_INPUT = ("c_attn", "c_fc"), ("attn_proj", "mlp_proj")


def local(tensor):
    """This rank's piece of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def cut(whole, like):
    """The piece of a whole tensor of this rank in the DTensor `like`. The innermost mesh dimension cuts first."""
    if hasattr(like, "placements"):
        mesh = like.device_mesh
        for size, rank, place in reversed(list(zip(mesh.shape, mesh.get_coordinate(), like.placements))):
            if not place.is_replicate():
                chunks = whole.chunk(size, place.dim)
                whole = chunks[rank] if rank < len(chunks) else chunks[0].narrow(place.dim, 0, 0)
    return whole


def stage(model, index, n):
    """Part `index` of n of a model: the same modules under the same names, with the layers of the others taken out,
    and the embedding and the head, where they belong to others."""
    part, L = copy.copy(model), len(model.blocks)
    for name, value in vars(model).items():         # modules, and hooks, which FSDP2 hangs on each part by itself
        if isinstance(value, dict):
            part.__dict__[name] = copy.copy(value)
    mine = range(L * index // n, L * (index + 1) // n)
    part.blocks = torch.nn.ModuleList(block if i in mine else None for i, block in enumerate(model.blocks))
    if index > 0:
        part.wte = part.wpe = None
    if index < n - 1:
        part.ln_f = part.head = None
    return part


class Engine:
    """A place in the grid of ranks, and what is done with a model on it. Made before anything else is; connect() meets
    the other ranks, wrap() lays out the model, and the optimizer is made of `params` after that."""

    def __init__(self, device, parallel="ddp", tp=1, pp=1, pp_schedule="1f1b", offload="", rank=0, world=1):
        self.device, self.parallel, self.tp, self.pp, self.pp_schedule = device, parallel, tp, pp, pp_schedule
        self.offload, self.rank, self.world, self.dp = offload, rank, world, world // (tp * pp)
        self.dp_rank, self.pp_rank = rank // tp % self.dp, rank // (tp * self.dp)   # which rows, which layers
        self.last = self.pp_rank == pp - 1
        self.speaks = self.last and rank % tp == 0              # one of the ranks that work on the same rows
        self.sharded = parallel != "ddp" or tp * pp > 1         # no rank holds everything
        self.store, self.schedules = None, {}

    # -------------------------------------------------------------------------
    # the other ranks

    def connect(self, timeout):
        """Meet the other ranks. From here on, waiting longer than `timeout` seconds for another one is an error."""
        if self.world == 1 and not self.sharded:
            return
        wait, self.timeout = timedelta(seconds=timeout), timeout
        store, rank, world = next(dist.rendezvous("env://", timeout=wait))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":   # torchrun's restarts share a store: stale addresses lie in it
            store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group("gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl", store=store, rank=rank,
                                world_size=world, timeout=wait)
        self.store = dist.PrefixStore("step", store)
        self.beat(0)
        sys.excepthook = self._excepthook

    def beat(self, step):
        """Leave word of the step that this rank has come to, about 0.1 ms, for the ranks that lose it."""
        self.step = step
        self.store.set(str(self.rank), f"{step}")

    def _excepthook(self, kind, e, trace):
        """Turns the error of a message that never came into one line that names the ranks which are silent."""
        text = " ".join(str(e).split())
        if not issubclass(kind, RuntimeError) or not any(
                word in text.lower() for word in ("timed out", "connection", "gloo/", "nccl error", "communicator")):
            return sys.__excepthook__(kind, e, trace)
        try:
            self.store.set_timeout(timedelta(seconds=5))
            self.store.set(str(self.rank), f"{self.step} waits")
            time.sleep(2 if self.rank else 4)       # all wake up at about the same time, and rank 0 may hold the store
            seen = [self.store.get(str(r)).decode() for r in range(self.world)]
            who = "; ".join(f"rank {r} is silent since step {s}" for r, s in enumerate(seen) if not s.endswith("waits"))
        except RuntimeError:
            who = "their common store is gone, too, and with it rank 0 or its host"
        print(f"[rank {self.rank}] error: another rank is lost, or hangs longer than --dist_timeout={self.timeout} s "
              f"({text[:160]}); {who or 'all ranks say so'}; start again with --resume", file=sys.stderr, flush=True)
        os._exit(1)             # no clean-up: it would wait for the lost one

    def total(self, values):
        """Sums over the data-parallel ranks of a float64 tensor that others in the grid repeat (tp) or lack (pp)."""
        if dist.is_initialized():
            dist.all_reduce(values)
            values /= self.tp
        return values

    # -------------------------------------------------------------------------
    # layout

    def wrap(self, model, compile=False):
        """Lay the model out. Whole engines take it to the device first; sharded ones take it from the host block by
        block, so that the device never holds it whole."""
        self.parts, shared = [model], False
        if not self.sharded:
            model.to(self.device)
            if compile:
                model.compile()                 # in place: the keys of a checkpoint stay clean
            ids = None if self.device == "cpu" else [torch.device(self.device)]
            # gradients are views of the buckets that are sent: a copy of the gradients less
            self.net = (DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True,
                                                broadcast_buffers=False)        # each rank's own, or equal anyway
                        if dist.is_initialized() else model)
        else:
            shared = self.pp > 1 and model.head.weight is model.wte.weight
            self._shard(model, compile)
        self.named = {name: p for part in self.parts for name, p in part.named_parameters()}
        # tied weights at both ends of a pipeline: one tensor of the checkpoint, held twice, and counted once
        self.twin = None
        if shared and (self.pp_rank == 0 or self.last):
            if self.last:
                self.named["wte.weight"] = self.named.pop("head.weight")
            self.twin = self.named["wte.weight"]
        self.named = dict(sorted(self.named.items(), key=lambda item: item[1].dim() <= 1))      # matrices first
        self.params = list(self.named.values())
        self.experts = [m for part in self.parts for m in part.modules() if hasattr(m, "aux_scale")]
        # the share of a tensor's squares that this rank adds to the norm: who holds the same piece adds the same
        self.shares = [0.0 if p is self.twin and self.last else self._pieces(p) * self.pp / self.world
                       for p in self.params]

    def _shard(self, model, compile):
        from torch.distributed.device_mesh import init_device_mesh  # a second: imported where it is used
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
        kind = torch.device(self.device).type
        shard = 1 if self.parallel == "ddp" else self.dp
        self.mesh = init_device_mesh(kind, (self.pp, self.dp // shard, shard, self.tp),
                                     mesh_dim_names=("pp", "replicate", "shard", "tp"))
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout   # torch < 2.14
        for group in self.mesh.get_all_groups():                # they would wait for half an hour
            set_timeout(timedelta(seconds=self.timeout), group)
        if self.pp > 1:
            per_rank = STAGES if self.pp_schedule == "interleaved" else 1
            self.indices = [self.pp_rank + self.pp * i for i in range(per_rank)]
            self.n_stages, self.n_embd = self.pp * per_rank, model.wte.embedding_dim
            self.parts = [stage(model, i, self.n_stages) for i in self.indices]
        half = model.dtype if model.dtype != torch.float32 else None
        options = dict(
            mesh=self.mesh["replicate", "shard"] if self.parallel == "ddp" else self.mesh["shard"],
            reshard_after_forward=self.parallel == "zero3",
            # weights travel in half precision, gradients are summed in float32, as without an engine
            mp_policy=MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(kind != "cpu") if self.offload else OffloadPolicy())
        for part in self.parts:
            blocks = [block for block in part.blocks if block is not None]
            for block in blocks:
                if self.tp > 1:
                    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
                    parallelize_module(block, self.mesh["tp"], {name: ColwiseParallel() for name in CUT_BY_OUTPUT}
                                       | {name: RowwiseParallel() for name in CUT_BY_INPUT})
                if compile:
                    block.compile()
                fully_shard(block, **options)
            fully_shard(part, **options)
        self.net = self.parts[0]

    @staticmethod
    def _pieces(p):
        """How many different pieces a tensor is cut into."""
        n = 1
        for size, place in zip(p.device_mesh.shape, p.placements) if hasattr(p, "placements") else ():
            n *= 1 if place.is_replicate() else size
        return n

    def train(self, mode=True):
        for part in self.parts:
            part.train(mode)

    # -------------------------------------------------------------------------
    # a step

    def micro(self, micro, n):
        """Rows that the loop hands over at a time of the n of a step: `micro`, or all of them to a pipeline."""
        self.micro_rows = micro
        return n if self.pp > 1 else micro

    def forward_backward(self, x, y, keep, factor, last, reduction="sum", aux=0.0):
        """Forward and backward pass of rows x, y (b, T); gradients of factor times the summed loss are added up (aux:
        the same for the experts' auxiliary losses, a row), and meet the other ranks' at the `last` micro-batch of
        a step (zero2, zero3: at every one, which is what keeps them sharded). Returns the detached loss, () or with
        reduction="none" (b*T,); a pipeline's ranks without it 0."""
        for moe in self.experts:        # a micro-batch's auxiliary losses weigh as its rows among the step's
            moe.aux_scale.fill_(aux * (self.micro_rows if self.pp > 1 else len(x)))
        if self.pp > 1:
            return self._pipeline(x, y, keep, factor)
        context = contextlib.nullcontext()
        if self.sharded:
            now = last or self.parallel in ("zero2", "zero3")
            self.net.set_requires_gradient_sync(now)
            self.net.set_reshard_after_backward(now)
        elif dist.is_initialized() and not last:
            context = self.net.no_sync()
        with context:
            loss = self.net(x, y, keep, reduction)
            (loss.sum() * factor).backward()
        return loss.detach()

    def loss(self, x, y):
        """The summed loss of rows (b, T) without dropping, for evaluation; a pipeline's ranks without it return 0."""
        return self.net(x, y) if self.pp == 1 else self._pipeline(x, y)

    def _pipeline(self, x, y, keep=None, factor=None):
        """A whole step (factor given), or an evaluation, through the stages. Between two stages goes the residual
        stream of all T tokens, so that its shape does not depend on what is dropped."""
        training = factor is not None
        rows = self.micro_rows if training else len(x)
        self.factor = factor
        if self.schedules.get(training, (None,))[0] != (x.shape, rows):     # a schedule is made for one shape
            self.schedules[training] = (x.shape, rows), self._schedule(len(x) // rows, rows, x.size(1), training)
        schedule = self.schedules[training][1]
        tokens = (x.clone(memory_format=torch.contiguous_format),) if self.pp_rank == 0 else ()     # strides count, too
        inputs = ({} if keep is None else {"keep": keep}) | (
            {"targets": y, "reduction": "none"} if self.last else {})       # one loss a token: chunks can be joined
        losses = (schedule.step(*tokens, **inputs, **({"target": y} if self.last else {})) if training else
                  schedule.eval(*tokens, **inputs))
        if training and self.twin is not None:          # add up the gradients of the tied weights: a + b is b + a
            mine, peer = local(self.twin.grad), self.rank + (-1 if self.last else 1) * (self.pp - 1) * self.dp * self.tp
            theirs, group = torch.empty_like(mine), self.mesh["pp"].get_group()
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer, group),
                                                dist.P2POp(dist.irecv, theirs, peer, group)]):
                work.wait()
            mine += theirs
        return losses.detach().sum() if self.last else torch.zeros((), device=self.device)

    def _schedule(self, n_micro, rows, T, training):
        from torch.distributed import pipelining
        dtype, device = self.parts[0].dtype, torch.device(self.device)
        stream = torch.empty(rows, T, self.n_embd, dtype=dtype, device="meta", requires_grad=training)

        def make(part, i):
            given = torch.empty(rows, T, dtype=torch.int64, device="meta") if i == 0 else stream
            made = torch.empty(rows * T, device="meta") if i == self.n_stages - 1 else stream
            return pipelining.PipelineStage(part, i, self.n_stages, device, (given,), (made,),
                                            group=self.mesh["pp"].get_group())
        stages = [make(part, i) for part, i in zip(self.parts, self.indices)]
        options = dict(loss_fn=lambda out, _: out.sum() * self.factor, scale_grads=False) if training else {}
        if self.pp_schedule == "interleaved":
            kind = pipelining.ScheduleInterleaved1F1B if training else pipelining.ScheduleLoopedBFS
            return kind(stages, n_micro, **options)
        kind = pipelining.Schedule1F1B if training and self.pp_schedule == "1f1b" else pipelining.ScheduleGPipe
        return kind(stages[0], n_micro, **options)

    def expert_shares(self, layers, n_expert):
        """What share of all tokens each expert got since the last call: {layer: [share]}. All ranks call it."""
        loads = torch.zeros(len(layers), n_expert, dtype=torch.float64, device=self.device)
        for part in self.parts:
            for i, block in enumerate(part.blocks):
                if i in layers and block is not None:
                    loads[layers.index(i)] += block.moe.load
                    block.moe.load.zero_()
        shares = self.total(loads)
        return {i: [round(x, 4) for x in row] for i, row in zip(layers, (shares / shares.sum(1, True)).tolist())}

    def grads(self):
        """This rank's pieces of the gradients, in the order of `params`."""
        return [local(p.grad) for p in self.params]

    def grad_norm(self, grads):
        """The norm of the whole gradient, a float, the same on every rank: an infinite one anywhere is seen by all."""
        if not self.sharded:
            return torch.nn.utils.get_total_norm(grads).item()
        squares = sum(share * norm.double() ** 2 for share, norm in zip(self.shares, torch._foreach_norm(grads)))
        squares = torch.as_tensor(squares, dtype=torch.float64, device=self.device)
        dist.all_reduce(squares)
        return squares.sqrt().item()

    # -------------------------------------------------------------------------
    # state

    def add_moments(self, optimizer):
        """Give the optimizer its state before the first step: on disk where --offload says so, and there to be loaded
        into. The files lose their names at once, so that they end with the process, however it ends."""
        folder = self.offload.removeprefix("disk:") if self.offload.startswith("disk:") else ""

        def zeros(p):
            if not folder:
                return torch.zeros_like(p)
            piece = local(p)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=f"rank{self.rank}-") as f:
                os.posix_fallocate(f.fileno(), 0, max(1, piece.numel()) * 4)        # a full disk says so here
                mapped = torch.from_file(f.name, shared=True, size=max(1, piece.numel()))[:piece.numel()]
            mapped = mapped.view(piece.shape)
            if piece is p:
                return mapped
            from torch.distributed.tensor import DTensor
            return DTensor.from_local(mapped, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            for p in self.params:
                optimizer.state[p] = {"momentum_buffer": zeros(p)} if isinstance(optimizer, torch.optim.SGD) else {
                    "step": torch.zeros((), device=local(p).device), "exp_avg": zeros(p), "exp_avg_sq": zeros(p)}

    def state(self, optimizer):
        """What a checkpoint holds, under names that no layout changes: the live tensors, to be saved or loaded into."""
        return {"model": {name: p.detach() for name, p in self.named.items()},
                "optimizer": {f"{name}.{key}": t for name, p in self.named.items()
                              for key, t in optimizer.state[p].items()}}
