"""Train a Transformer on less data and less compute: curriculum, token dropping, and one plan for both.

    python train.py                                       the embedded corpus, all techniques on
    python train.py --pool=off --seqlen=off --ltd=off     a plain GPT trainer
    python train.py --plan                                the whole run as a table, without training
    torchrun --nproc_per_node=8 train.py --data=data/mine
    python train.py --sample --resume                     text from the newest checkpoint

A run is a table made before step 0 and never changed: one row a step with pool, length, kept tokens, rows, tokens and
learning rate, ending where the budget (counted in layer-tokens) is used up. To resume is to go to row N.
Paper: "DeepSpeed Data Efficiency", arXiv 2212.03597.
"""
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import checkpoint
import data
import ds_config
import hf
import ltd
import probe
from config import (CALL, DRAWN, EMBEDDED, Config, check, ensure_embedded, loss_scale, pick_device, plan_of,
                    resumed, settle, store_for_plan, task_of)
from flags import flag_words, parse_flags, run_command
from model import forward_flops, moe_layers
from output import (Profile, TensorBoard, Trackers, append_line, device_name, git_hash, open_lines, peak_flops,
                    peak_memory, plot_loss, print0, read_log, start_wandb)
from parallel import Engine
from plan import print_plan
from tokenizer import load_tokenizer


# the flags that shape a model of any family
MODEL_FLAGS = ("n_layer", "n_head", "n_embd", "dropout", "bias", "pos", "init_std", "recompute", "gelu", "norm",
               "n_expert", "expert_top_k", "moe_every", "moe_balance", "moe_z")


def main():
    cfg, given = parse_flags(Config, sys.argv[1:], __doc__.splitlines()[0])
    if cfg.ds_config:
        cfg, given = parse_flags(Config, ds_config.command_line(cfg, given), "")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    reads = "sample" if cfg.sample else "export" if cfg.export else ""      # what only reads a checkpoint
    if reads and not cfg.resume:
        raise ValueError(f"--{reads} works on a checkpoint: give --resume and the run's --out=FOLDER")
    found = checkpoint.newest(cfg.out) if cfg.resume else None
    if cfg.resume and not found and given <= CALL:
        raise ValueError(f"--out={cfg.out} holds no checkpoint to resume from; to start a run that a later call may "
                         "resume, give its settings with --resume")
    if found:
        path, content = found
        if "vocab_size" not in content:
            raise ValueError(f"{path} is of an older version of this code: go on with that one, or start another run")
        cfg = resumed(cfg, given, path, content["config"])
        device, _ = pick_device(cfg)
    elif reads:
        raise ValueError(f"--out={cfg.out} holds no checkpoint to {reads}; train first: "
                         f"python train.py --out={cfg.out}")
    else:
        device, dtype = pick_device(cfg)
        settle(cfg, given, device)
    check(cfg, given, world)
    if not found:
        cfg.dtype = dtype
    if cfg.plan:
        return print_plan(plan_of(cfg, store_for_plan(cfg)), cfg.plot)
    if cfg.probe:
        if world > 1:
            raise ValueError("--probe is for one process: python train.py --probe=...")
        flags = [word for word in flag_words(cfg, given) if not word.startswith(("--probe=", f"--{cfg.probe}="))]
        return probe.probe(cfg, flags, plan_of(cfg, store_for_plan(cfg)))

    # everything that can be refused is refused here, before anything is written
    if cfg.data in (EMBEDDED, DRAWN):
        ensure_embedded(cfg)
    task = task_of(cfg)
    store = task.store
    fingerprint = store.meta["fingerprint"]
    if found and content["fingerprint"] != fingerprint:
        raise ValueError(f"{path} was trained on other data ({content['fingerprint']}) than {cfg.data} "
                         f"({fingerprint}); give its --data=FOLDER")
    plan = plan_of(cfg, store)
    if plan.length.min() < task.least:
        raise ValueError(f"rows of {plan.length.min()} tokens are too short: --arch={cfg.arch} needs {task.least} "
                         "here; give a longer --block_size or START of --seqlen")
    order = zlib.crc32(plan.sampler.order)
    if found and content["order"] != order:
        raise ValueError(f"{path} was trained on other difficulties than the columns in {store.columns} hold now; "
                         "put those back, or start another run with another --out")
    engine = Engine(device, cfg.parallel, cfg.tp, cfg.pp, cfg.pp_schedule, cfg.offload, rank, world)
    dp, dp_rank = engine.dp, engine.dp_rank             # the ranks that share a batch
    if plan.batch.min() < dp:
        raise ValueError(f"step {plan.batch.argmin()} has {plan.batch.min()} samples for {dp} ranks; "
                         "take fewer ranks, or a larger --global_batch")
    tokenizer = load_tokenizer(cfg.data)
    out = Path(cfg.out)
    if ((out / "log.jsonl").exists() or checkpoint.checkpoints(out)) and not cfg.resume and not cfg.overwrite:
        raise ValueError(f"--out={out} holds a run already: --resume continues it, --overwrite deletes it, "
                         "another --out keeps it")

    torch.manual_seed(cfg.seed)         # before the weights are drawn: they are the same on every rank and device
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    kernel = "off" if cfg.ltd == "off" else ltd.load_kernel(cfg.ltd_kernel, device)
    model = task.model(dtype=getattr(torch, cfg.dtype), ltd_layers=plan.ltd_layers,
                       **{name: getattr(cfg, name) for name in MODEL_FLAGS})
    if cfg.init_from and not found:
        hf.load(cfg.init_from, model, cfg.arch, task.ends.get("n_labels", 0))

    def sample(model):
        """Text after the prompt; the same for the same seed."""
        prompt = tokenizer.encode(cfg.prompt).tolist() if tokenizer and cfg.prompt else []
        start = torch.tensor([[store.meta["eot_id"], *prompt]], device=device)
        g = torch.Generator(device).manual_seed(cfg.seed)
        ids = model.generate(start, cfg.max_new_tokens, cfg.temperature, cfg.top_k, g)[0, 1:].tolist()
        return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
    if reads:
        checkpoint.load(path, content, {"model": dict(model.named_parameters())})
        if cfg.export.startswith("hf:"):
            return hf.save(model, dataclasses.asdict(cfg), cfg.export[3:])
        if cfg.export:
            return checkpoint.export(path, content, {"model": model.state_dict()}, cfg.export)
        return print(sample(model.to(device)))
    if found and content["step"] == plan.steps and plan.steps in read_log(out)[2]:
        return print0(f"{path} is the end of its run: nothing is left to do")
    task.open_val()
    n_eval = min(cfg.eval_samples or task.n_val, task.n_val)
    windows = np.arange(n_eval) * task.n_val // n_eval

    # the other ranks, and the folder
    start = content["step"] if found else 0
    engine.connect(cfg.dist_timeout)
    if world > 1:
        all_views, mine = [None] * world, (start, fingerprint, order, plan.steps, n_eval)
        dist.all_gather_object(all_views, mine)
        if any(view != all_views[0] for view in all_views):
            raise ValueError("the ranks see different runs (checkpoint's step, data, order, steps, windows): "
                             f"{all_views}; every rank needs the same --data and the checkpoints in --out: share the "
                             "folder, or copy it to every host")
    log = trace = None
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        old = [] if found else [*checkpoint.checkpoints(out), *out.glob("events.out.tfevents.*"), out / "log.jsonl",
                                out / "loss.png", out / "trace.json"]
        for stale in [*out.glob("*.tmp"), *old]:        # what a killed process was writing, an overwritten run left
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
        if cfg.trace and not found:
            Path(cfg.trace).unlink(missing_ok=True)
        settings = json.dumps(dataclasses.asdict(cfg), indent=1).encode()
        data.write_atomic(out / "config.json", lambda f: f.write(settings))
        log = open_lines(out / "log.jsonl")
    if world > 1:
        dist.barrier()                                  # the trace is opened behind its removal
    if cfg.trace and engine.speaks:
        trace = open_lines(cfg.trace)

    # the optimizer, and what a resumed run brings along
    n_params = model.n_params()
    engine.wrap(model, cfg.compile)
    groups = [dict(params=[p for p in engine.params if (p.dim() > 1) == matrix], weight_decay=decay)
              for matrix, decay in ((True, cfg.weight_decay), (False, 0.0))]
    optimizer = (torch.optim.SGD(groups, cfg.learning_rate, cfg.beta1, foreach=True) if cfg.optimizer == "sgd" else
                 torch.optim.AdamW(groups, cfg.learning_rate, (cfg.beta1, cfg.beta2), cfg.eps, fused=True))
    first_scale, grow = loss_scale(cfg) if cfg.dtype == "float16" else (1.0, 0)
    seconds, skipped, scale, good = 0.0, 0, first_scale, 0
    score = by_id = None                                # TokenBypass: the running loss of every token id
    if cfg.ltd_choice == "importance":
        score, by_id = (torch.zeros(*shape, store.meta["vocab_size"], dtype=torch.float64, device=device)
                        for shape in ((), (2,)))
    engine.add_moments(optimizer)
    state = engine.state(optimizer) | ({} if score is None else {"score": {"score": score}})
    saver = checkpoint.Saver(out, rank, engine.sharded or cfg.ckpt_async, not cfg.ckpt_async, cfg.dist_timeout)
    if found:
        seconds, skipped, scale, good = (content[k] for k in ("seconds", "skipped", "scale", "good"))
        checkpoint.load(path, content, state)
        del content, found
        print0(f"resumed from {path} at step {start}")
    elif cfg.resume:
        print0(f"{out} holds no checkpoint: starting from step 0")

    about = dict(git=git_hash(), torch=torch.__version__, python=sys.version.split()[0], device=device_name(device),
                 world=world, params=n_params, fingerprint=fingerprint, steps=plan.steps)
    print0(f"{about['params']:,} parameters | {about['device']} x {world}, {cfg.dtype} | "
           f"data {cfg.data} ({fingerprint}), {store.n_samples:,} samples of {cfg.block_size} | "
           f"{plan.steps} steps (plain: {plan.plain_steps})\n"
           f"pool {' '.join(cfg.pool)} | seqlen {cfg.seqlen} | ltd {cfg.ltd}\nltd: {kernel}")
    trackers = Trackers(
        wandb=cfg.wandb and rank == 0 and (lambda: start_wandb(out, dataclasses.asdict(cfg) | about, cfg.wandb_group)),
        tensorboard=cfg.tensorboard and rank == 0 and (lambda: TensorBoard(out, start)))
    profile = Profile(cfg.profile, out, device) if cfg.profile and rank == 0 else None
    if rank == 0:
        append_line(log, {"config": dataclasses.asdict(cfg), **about, "start": start})

    def record_line(record):
        if rank == 0:
            append_line(log, record)
            trackers.log(record)

    # the data: every rank draws the global batch and takes its share, so that ranks agree without talking
    def make_batch(step):
        first, last = (int(plan.batch[step]) * r // dp for r in (dp_rank, dp_rank + 1))
        everyone, length = plan.sampler.ids(step), int(plan.length[step])
        ids = everyone[first:last]
        x, y = task.batch(ids, length, step, first, plan.mode)
        pieces = len(x) // len(ids)
        tensors = [x, y, torch.arange(first * pieces, last * pieces)]               # places in the global batch
        n = task.targets(everyone, length, int(plan.tokens[step]))
        return ids, pieces, first, n, [t.pin_memory() for t in tensors] if device != "cpu" else tensors

    @torch.no_grad()
    def evaluate():
        """What the task is judged by, over the same n_eval validation samples: full length, dense, a share a rank."""
        engine.train(False)
        total, begin, stop = 0.0, n_eval * dp_rank // dp, n_eval * (dp_rank + 1) // dp
        # as many turns on every rank, because a sharded model's ranks work together: an idle one repeats a window
        for i in range(begin, begin - (-n_eval // dp), cfg.batch_size):
            x, y = task.val_batch(windows[i:min(i + cfg.batch_size, stop)] if i < stop else windows[:1])
            sums = task.score(engine, x.to(device), y.to(device), i if i < stop else 0, n_eval)
            total += sums if i < stop else torch.zeros_like(sums)
        engine.train()
        return task.metrics(engine.total(total), windows)

    told = []                                           # SIGTERM: save and end after the step under way
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    n_ltd = len(plan.ltd_layers)
    layers = torch.tensor(plan.ltd_layers, device=device)
    if cfg.ltd_redraw == "once":                        # the draw is keyed on the layer: one key, one draw
        layers = layers[:1].repeat(n_ltd)
    with_experts = moe_layers(cfg.n_layer, cfg.n_expert, cfg.moe_every)
    moe = [sum((i in plan.ltd_layers) == dropped for i in with_experts) for dropped in (False, True)]
    # backward costs twice the forward pass
    flops = np.array([3 * r * forward_flops(cfg.n_layer, cfg.n_embd,
                                            task.cls.ends_flops(cfg.n_embd, T, **task.ends, mask_prob=cfg.mask_prob),
                                            T, K, n_ltd, task.cls.causal, moe, cfg.n_expert, cfg.expert_top_k)
                      for r, T, K in zip(plan.rows.tolist(), plan.length.tolist(), plan.keep.tolist())], float)
    peak = peak_flops(device) * world
    batches = data.prefetch(make_batch, start, plan.steps)
    bad, recent, saved, sound, stop = 0, [], start, start, False
    engine.train()
    for step in range(start, plan.steps + 1):
        spent = {name: int(sums[step]) for name, sums in plan.spent.items()}
        end = step == plan.steps or stop or 0 < cfg.stop_step <= step
        # weights that gave no finite gradient are not worth keeping; with float16 a scale too high is the usual reason
        if step > saved and (end or step % cfg.save_interval == 0) and (not bad or scale > 1):
            saver.save(step, dict(step=step, seconds=seconds, skipped=skipped, scale=scale, good=good, order=order,
                                  fingerprint=fingerprint, vocab_size=task.ends.get("vocab_size", 0), ends=task.ends,
                                  config=dataclasses.asdict(cfg)), state)
            saved = step
        if (end or step % cfg.eval_interval == 0) and not stop:
            scores = evaluate()
            print0(f"step {step:05d}/{plan.steps:05d} | validation "
                   + " | ".join(f"{name.removeprefix('val_')} {value:.4f}" for name, value in scores.items()))
            record_line({"step": step, **scores, "seconds": seconds, "flops": flops[:step].sum(), **spent})
        if end:
            break

        # forward and backward, micro-batch by micro-batch
        saver.finish(wait=False)
        if profile:
            profile.at(step)
        t0 = time.perf_counter()
        ids, pieces, first, n, tensors = next(batches)
        waited = time.perf_counter() - t0               # for the data: prefetched, so next to nothing
        x, y, place = (t.to(device, non_blocking=True) for t in tensors)
        T, K, lr = int(plan.length[step]), int(plan.keep[step]), float(plan.lr[step])
        micro, total, hashes = engine.micro(cfg.batch_size * pieces, len(x)), torch.zeros((), device=device), []
        for i in range(0, len(x), micro):
            part = slice(i, i + micro)
            keep = None
            if K < T:
                keep = (ltd.draw(cfg.seed, step, place[part], layers, T, K) if score is None else
                        ltd.important(score, x[part], K, n_ltd))
            # dropout's masks follow from (seed, step, the micro-batch's first row): a resume needs no generator's
            # state, and ranks equal one process wherever their micro-batches begin at the same rows
            if cfg.dropout:
                torch.manual_seed(np.random.SeedSequence((cfg.seed, step, first * pieces + i)).generate_state(1).item())
            # sum / targets of the global batch; the engine takes the mean over the dp ranks
            loss = engine.forward_backward(x[part], y[part], keep, dp * scale / n, i + micro >= len(x),
                                           "sum" if score is None else "none", dp * scale / int(plan.rows[step]))
            if score is not None:                       # (b*T,) losses to their target ids
                each = torch.stack((loss.double(), (y[part].reshape(-1) >= 0).double()))
                by_id.index_add_(1, y[part].reshape(-1).clamp(min=0), each)
            total += loss.sum()
            if trace is not None:
                hashes += [0] * len(x[part]) if keep is None else [zlib.crc32(k.tobytes()) for k in keep.cpu().numpy()]
        stop = bool(told)
        if world > 1:           # one message: loss and whether any rank was told to stop, so that all stop at one step
            engine.beat(step)
            total, told_any = engine.total(torch.stack((total.double(), total.new_tensor(stop, dtype=torch.float64))))
            stop = bool(told_any > 0)

        if score is not None:
            if world > 1:
                dist.all_reduce(by_id)
            ltd.rescore(score, by_id)
            by_id.zero_()

        # clip and update, or skip: the norm is the same on all ranks, and so is what follows from it. It costs a sync
        grads = engine.grads()
        norm = engine.grad_norm(grads) / scale
        if math.isfinite(norm):
            factor = (min(1.0, cfg.grad_clip / (norm + 1e-6)) if cfg.grad_clip else 1.0) / scale
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            bad, good, sound = 0, good + 1, step            # the weights that this step began with are sound
            if saved == step:
                saver.prune(cfg.keep_ckpts)
            if grow and good % grow == 0:
                scale *= 2
        else:                   # the step is spent, the weights are untouched
            bad, skipped, good = bad + 1, skipped + 1, 0
            scale = max(1.0, scale / 2) if grow else scale
            if bad == 10:
                saver.finish()
                kept = saver.prune(cfg.keep_ckpts, sound)
                newest = kept[-1] if kept else "(none was saved)"
                sys.exit(f"error: 10 steps in a row gave no finite gradient, the last at step {step}; the last good "
                         f"checkpoint is {newest}: lower --learning_rate (now {lr:.2g}) and start again")
        optimizer.zero_grad(set_to_none=True)
        mean, dt = float(total) / n, time.perf_counter() - t0
        seconds += dt

        # tell
        spent = {name: int(sums[step + 1]) for name, sums in plan.spent.items()}
        if step > start + 2:                            # the first steps warm caches up
            recent = (recent + [(dt, plan.tokens[step], flops[step], waited)])[-20:]
        if trace is not None:
            append_line(trace, dict(step=step, rank=dp_rank, sample_ids=ids.tolist(), ltd_keep=K, ltd_hash=hashes,
                                    lr=lr, difficulty={k: float(v[step]) for k, v in plan.limits.items()},
                                    tokens_seen=spent["tokens"], layer_tokens=spent["layer_tokens"], loss=mean))
        shares = {}
        if with_experts and step % cfg.log_interval == 0:
            shares = {"expert_shares": engine.expert_shares(with_experts, cfg.n_expert)}
        if rank == 0 and step % cfg.log_interval == 0:
            busy, fed, work, idle = map(sum, zip(*(recent or [(dt, plan.tokens[step], flops[step], waited)])))
            mfu = work / busy / peak
            eta = flops[step + 1:].sum() / (work / busy) / 60
            print(f"step {step:05d}/{plan.steps:05d} | loss {mean:.4f} | lr {lr:.1e} | "
                  f"pool {plan.pool[step] / store.n_samples:.0%} | len {T} | keep {K}/{T} | {dt * 1e3:.0f} ms | "
                  f"{fed / busy / 1e6:.3f}M tok/s | " + (f"mfu {mfu:.1%} | " if peak == peak else "")
                  + f"eta {eta:.0f}m" + (f" | waits for data {idle / busy:.0%}" if idle > 0.02 * busy else "")
                  + (f" | {skipped} skipped" if skipped else ""), flush=True)
            record_line({"step": step, "loss": mean, "lr": lr, "pool": int(plan.pool[step]), "length": T, "keep": K,
                         "norm": norm, "skipped": skipped, "ms": dt * 1e3, "tok_s": fed / busy,
                         "mfu": mfu if peak == peak else None, "data_wait": idle / busy,
                         "memory_mb": peak_memory(device) >> 20, "seconds": seconds, **spent,
                         **shares})

    # the end
    batches.close()
    if profile:
        profile.finish()
    saver.finish()
    memory = peak_memory(device)
    if world > 1:
        memory = torch.tensor(memory, device=device)
        dist.all_reduce(memory, dist.ReduceOp.MAX)
    if rank == 0:
        saver.prune(cfg.keep_ckpts)
        plot_loss(out)
        if step == plan.steps and not engine.sharded and cfg.arch == "gpt":
            print(f"\n{sample(model)}\n")
        scores = {"val_loss": "not evaluated"} if stop else {k: f"{v:.4f}" for k, v in scores.items()}
        result = dict(scores, tokens_sampled=spent["sampled"], tokens_with_loss=spent["tokens"],
                      tokens_cut_off=spent["sampled"] - spent["tokens"], layer_tokens=spent["layer_tokens"],
                      seconds=f"{seconds:.1f}", steps=f"{step} of {plan.steps}", skipped=skipped,
                      peak_memory_mb=round(int(memory) / 2**20), corpus=fingerprint, out=out)
        print("---\n" + "\n".join(f"{key}: {value}" for key, value in result.items()), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    trackers.finish()


if __name__ == "__main__":
    run_command(main)
