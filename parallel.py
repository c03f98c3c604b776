"""Where weights, gradients and optimizer state lie on data-parallel ranks: PyTorch's engines behind a few functions.

    --parallel=ddp      every rank holds everything (DistributedDataParallel)
    --parallel=zero1    optimizer state is sharded; gradients are summed once a step
    --parallel=zero2    gradients too: they are summed and sharded after every micro-batch
    --parallel=zero3    weights too: gathered layer by layer where they are needed, forward and backward
    --offload=cpu       shards wait in the host's memory between uses (zero1 to zero3)

zero1 to zero3 are FSDP2 (torch.distributed.fsdp.fully_shard) with the switches set to what the names mean; between
steps it shards the weights under all three, so each is at least what it says. The names and what they save:
"ZeRO", arXiv 1910.02054 section 5. A checkpoint is the plain one whatever wrote it, so any layout reads any other's.
"""
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ENGINES = ("ddp", "zero1", "zero2", "zero3")


def wrap(model, parallel, device, offload=""):
    """What the training loop calls instead of `model`. zero*: shards it in place, so the optimizer is made after."""
    if parallel == "ddp":
        if not dist.is_initialized():
            return model
        return DistributedDataParallel(model, device_ids=None if device == "cpu" else [torch.device(device)])
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # a second: where it is used
    policy = CPUOffloadPolicy(pin_memory=device != "cpu") if offload == "cpu" else OffloadPolicy()
    for part in (*model.blocks, model):
        fully_shard(part, reshard_after_forward=parallel == "zero3", offload_policy=policy)
    return model


def micro_batch(net, parallel, last):
    """A context for forward and backward of one micro-batch: gradients meet the other ranks' at the `last` one, under
    zero2 and zero3 at every one, which is what keeps them sharded."""
    if isinstance(net, DistributedDataParallel) and not last:
        return net.no_sync()
    if parallel != "ddp":
        now = last or parallel != "zero1"
        net.set_requires_gradient_sync(now)
        net.set_reshard_after_backward(now)
    return contextlib.nullcontext()


def grad_norm(grads):
    """The norm of the whole gradient, a float, the same on every rank."""
    norm = torch.nn.utils.get_total_norm(grads)
    return whole(norm, True).item()


def whole(tensor, keep):
    """A tensor out of its shards, which takes every rank; on ranks that do not keep it, None."""
    if hasattr(tensor, "full_tensor"):          # a DTensor
        tensor = tensor.full_tensor()
        return tensor.cpu() if keep else None
    return tensor


def gather(model, optimizer, keep):
    """(model, optimizer) state dicts as one process would have them, on the rank with keep=True. All ranks call it."""
    weights = {name: whole(t, keep) for name, t in model.state_dict().items()}
    state = optimizer.state_dict()
    return weights, state | {"state": {i: {k: whole(t, keep) for k, t in s.items()} for i, s in state["state"].items()}}


def load_optimizer(optimizer, saved):
    """Load a whole optimizer state dict, cutting it to this rank's shards. All ranks call it, each with the whole."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(hasattr(p, "full_tensor") for p in params):
        return optimizer.load_state_dict(saved)
    from torch.distributed.tensor import distribute_tensor

    def cut(t, p):
        if t.shape != p.shape:                  # AdamW's step count
            return t
        return distribute_tensor(t.to(p.device_mesh.device_type), p.device_mesh, p.placements)
    state = {i: {k: cut(t, params[i]) for k, t in s.items()} for i, s in saved["state"].items()}
    optimizer.load_state_dict(saved | {"state": state})
