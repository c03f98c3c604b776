"""The DeepSpeed door: turns the JSON file that configures DeepSpeed's Data Efficiency library into our own flags.

    python train.py --ds_config=ds.json --data=data/mine --model=gpt3-1.3b --train_tokens=300e9

The format: https://www.deepspeed.ai/docs/config-json/ (sections "Data Efficiency" and "Curriculum Learning").
Such a file says nothing of the data, the model's width and context, or the budget: give those as flags. A technique
that it leaves out or switches off is off. A key that is not in the table below is refused, so that no setting is lost
in silence. Try it:  python -c "import ds_config; print(*ds_config.read_ds_config('ds.json'))"
"""
import json
import os
import shlex
import sys
from pathlib import Path

from flags import flag_words

# -----------------------------------------------------------------------------
# the table: what the file may hold and what each value must be. ANY marks the keys that nothing here depends on: where
# DeepSpeed's files lie, how it loads, logs and communicates

ANY, BOOL, NUMBER = "anything", "true or false", "a number, 0 or more"
WHOLE, COUNT, LIST = "a whole number, 0 or more", "a whole number, 1 or more", "a list of whole numbers, 0 or more"
PAIR = "two numbers from 0 to 1"

PACE = {"min_difficulty": WHOLE, "max_difficulty": WHOLE,
        "schedule_type": ("fixed_linear", "fixed_root", "fixed_discrete", "custom"),
        "schedule_config": {"total_curriculum_step": COUNT, "difficulty_step": COUNT, "root_degree": COUNT,
                            "difficulty": LIST, "max_step": LIST}}
METRIC = {"difficulty_type": ("value", "percentile"), "clustering_type": ("schedule_based", "single_cluster"), **PACE,
          "index_to_sample_path": ANY, "index_to_metric_path": ANY}
RANDOM_LTD = {"enabled": BOOL, "total_layer_num": COUNT, "random_ltd_layer_num": COUNT, "random_ltd_layer_id": LIST,
              "model_mask_name": ANY, "model_type": ANY, "hidden_state_order": ANY,
              "random_ltd_schedule": {"min_value": COUNT, "max_value": COUNT, "schedule_type": ("fixed_linear",),
                                      "schedule_config": {"require_steps": COUNT, "seq_per_step": COUNT}},
              "layer_token_lr_schedule": {"enabled": BOOL, "total_layer_tokens": ANY, "warmup_type": ANY,
                                          "warmup_layer_tokens": ANY}}
OFFLOAD = {"device": ("none", "cpu", "nvme"), "nvme_path": ANY, "*": ANY}
FILE = {"train_batch_size": COUNT, "train_micro_batch_size_per_gpu": COUNT, "gradient_accumulation_steps": COUNT,
        "gradient_clipping": NUMBER,
        "fp16": {"enabled": BOOL, "loss_scale": NUMBER, "initial_scale_power": WHOLE, "loss_scale_window": COUNT,
                 **dict.fromkeys("auto_cast hysteresis consecutive_hysteresis min_loss_scale".split(), ANY)},
        "bf16": {"enabled": BOOL},
        "zero_optimization": {"stage": (0, 1, 2, 3), "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD, "*": ANY},
        "optimizer": {"type": ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"),
                      "params": {"lr": NUMBER, "betas": PAIR, "eps": NUMBER, "weight_decay": NUMBER,
                                 "adam_w_mode": (True,), "bias_correction": (True,), "torch_adam": ANY}},
        "scheduler": {"type": ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
                      "params": {"warmup_num_steps": COUNT, "total_num_steps": COUNT, "warmup_type": ("linear",),
                                 "warmup_min_lr": (0,), "warmup_min_ratio": (0,), "warmup_max_lr": NUMBER,
                                 "cos_min_ratio": NUMBER, "last_batch_iteration": ANY}},
        "activation_checkpointing": {"partition_activations": (False,), "cpu_checkpointing": (False,), "*": ANY},
        "data_efficiency": {
            "enabled": BOOL, "seed": WHOLE,
            "data_sampling": {"enabled": BOOL, "num_epochs": ANY, "num_workers": ANY, "pin_memory": ANY,
                              "curriculum_learning": {"enabled": BOOL, "data_cluster_path": ANY,
                                                      "curriculum_metrics": {"*": METRIC}}},
            "data_routing": {"enabled": BOOL, "random_ltd": RANDOM_LTD}},
        "curriculum_learning": {"enabled": BOOL, "curriculum_type": ("seqlen",), **PACE},       # older: lengths only
        **dict.fromkeys("steps_per_print wall_clock_breakdown memory_breakdown dump_state flops_profiler comms_logger "
                        "tensorboard wandb comet csv_monitor dataloader_drop_last prescale_gradients "
                        "gradient_predivide_factor".split(), ANY)}

# metrics of the public scripts -> our columns; any other name is a column of that name
POOLS = {"vocabularyrarity": "voc", "vocab_rarity": "voc", "seqlenvocabularyrarity": "seqlen_voc",
         "seqlenvocabrarity": "seqlen_voc", "seqlen_vocab_rarity": "seqlen_voc"}
LENGTHS = {"seqlen_truncate": "truncate", "seqlen_reshape": "reshape"}
CURRICULUM, LTD = "data_efficiency.data_sampling.curriculum_learning", "data_efficiency.data_routing.random_ltd"


def fits(value, what):
    """Is the value what the table says? A whole number is an int here, however it is written; true is none."""
    if isinstance(what, tuple):
        return value in what
    whole = type(value) is int and value >= 0
    return {ANY: True, BOOL: isinstance(value, bool), WHOLE: whole, COUNT: whole and value > 0,
            NUMBER: whole or (type(value) is float and 0 <= value < float("inf")),
            PAIR: isinstance(value, list) and len(value) == 2 and all(type(v) in (int, float) and 0 <= v < 1
                                                                      for v in value),
            LIST: isinstance(value, list) and all(fits(v, WHOLE) for v in value)}[what]


def check(value, table, path=""):
    """Refuse a key that the table does not hold or a value that does not fit, here and below, switched on or not."""
    if not isinstance(table, dict):
        if not fits(value, table):
            what = " or ".join(json.dumps(word).strip('"') for word in table) if isinstance(table, tuple) else table
            raise ValueError(f"{path} must be {what}, not {json.dumps(value)[:60]}")
        return
    if not isinstance(value, dict):
        raise ValueError(f"{path or 'the file'} must be an object, {{...}}, not {json.dumps(value)[:60]}")
    for key, entry in value.items():
        if key not in table and "*" not in table:
            raise ValueError(f"{path + '.' if path else ''}{key} is not known; known there: {', '.join(table)}")
        check(entry, table.get(key, table.get("*")), f"{path}.{key}" if path else key)


def need(section, path, *keys):
    """The values of keys that must be there: a list, or the value itself of one key. ValueError for a missing one."""
    for key in keys:
        if key not in section:
            raise ValueError(f"{path}.{key} is missing; {path} needs {', '.join(keys)}")
    return [section[key] for key in keys] if len(keys) > 1 else section[keys[0]]


def part(config, name):
    """A section by its dotted name: (the dict, or {} where there is none; whether it and all those round it are on)."""
    on = True
    for key in name.split("."):
        config = config.get(key, {})
        on = on and config.get("enabled", False)            # absent means off, as in DeepSpeed
    return config, on


# -----------------------------------------------------------------------------
# sections to flags; all raise ValueError for what cannot be followed exactly


def batch_flags(config):
    """Batch sizes. The accumulation has no flag: it follows from the other two and the number of ranks."""
    keys = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    batch, micro, steps = (config.get(key, 1) for key in keys)
    if keys[0] not in config and set(keys) & set(config):
        raise ValueError(f"{keys[0]} is missing; without it the batch would depend on the number of GPUs")
    if batch % (micro * steps):
        raise ValueError(f"{keys[0]} ({batch}) must be a multiple of {keys[1]} x {keys[2]} ({micro} x {steps})")
    return [f"--{flag}={config[key]}" for flag, key in zip(("global_batch", "batch_size"), keys) if key in config]


def pace(section, path, unit=""):
    """A metric's schedule -> (START..END:DURATION[:SHAPE], the multiple that its difficulties keep to)."""
    start, end, kind = need(section, path, "min_difficulty", "max_difficulty", "schedule_type")
    if kind == "custom":
        raise ValueError(f"{path}.schedule_type: a custom schedule is code and not in the file; "
                         "write FILE.py:FUNCTION as SHAPE by hand, as in --pool=voc:1%..100%:40%:my.py:f")
    if start > end:
        raise ValueError(f"{path}.min_difficulty ({start}) must not be above max_difficulty ({end})")
    config, path = need(section, path, "schedule_config"), f"{path}.schedule_config"
    text = f"{start}{unit}..{end}{unit}"
    if kind == "fixed_discrete":
        levels, last = need(config, path, "difficulty", "max_step")
        if not last or last[0] < 1 or last != sorted(set(last)) or len(levels) != len(last) + 1:
            raise ValueError(f"{path}.max_step must rise from 1 or more and have one entry less than difficulty ("
                             f"{len(levels)}), not {last}")
        # DeepSpeed stays where it is once it is at max_difficulty, and a pace of ours only grows
        if levels != sorted(levels) or (levels[0], levels[-1]) != (start, end):
            raise ValueError(f"{path}.difficulty must rise from min_difficulty to max_difficulty, not {levels}")
        # DeepSpeed counts the steps of a curriculum from 1, we from 0. Multiple 1 leaves the levels as they are
        return f"{text}:{last[-1]}:" + ",".join(f"{level}@{step - 1}" for level, step in zip(levels, last)), 1
    steps, multiple = need(config, path, "total_curriculum_step", "difficulty_step")
    root = need(config, path, "root_degree") if kind == "fixed_root" else 1
    return f"{text}:{steps}" + {1: "", 2: ":sqrt"}.get(root, f":root{root}"), multiple


def metric_flags(metrics, path):
    """All metrics of a curriculum -> (flags of the pools, flags of the length)."""
    pools, length = [], []
    for name, metric in metrics.items():
        where = f"{path}.{name}"
        kind, cluster = need(metric, where, "difficulty_type", "clustering_type")
        mode = "truncate" if (name, cluster) == ("seqlen", "single_cluster") else LENGTHS.get(name)
        text, multiple = pace(metric, where, "%" if kind == "percentile" else "")
        if mode:
            if (kind, cluster) != ("value", "single_cluster"):
                raise ValueError(f"{where} paces a length and needs difficulty_type value and clustering_type "
                                 "single_cluster; for a pool by length take seqlen with schedule_based")
            if length:
                raise ValueError(f"{where}: another metric paces the length already ({length[0]}); keep one")
            length = [f"--seqlen={mode}:{text}", f"--seqlen_multiple={multiple}"]
            continue
        if cluster == "single_cluster":
            raise ValueError(f"{where}.clustering_type must be schedule_based for a pool; with single_cluster, "
                             "DeepSpeed draws from all samples and leaves the difficulty to code of yours")
        if not name.isidentifier():
            raise ValueError(f"{where}: the metric must have the name of a function, as in "
                             "data_analyze.py --metric=FILE.py:NAME")
        # DeepSpeed cuts the samples into max_difficulty parts, so that only with 100 a percentile is one
        if kind == "percentile" and metric["max_difficulty"] != 100:
            raise ValueError(f"{where}.max_difficulty must be 100 with difficulty_type percentile, "
                             f"not {metric['max_difficulty']}")
        if multiple != 1 and metric["min_difficulty"] != metric["max_difficulty"]:
            raise ValueError(f"{where}.schedule_config.difficulty_step must be 1, not {multiple}: a pool grows by 1")
        pools.append(f"--pool={POOLS.get(name, name)}:{text}")
    if any(flag.startswith(("--pool=seqlen:", "--pool=seqlen_voc:")) for flag in pools):
        pools.append("--samples=document")          # windows of the token stream all have the same length
    return pools, length


def ltd_flags(ltd, path):
    """random_ltd -> the number of layers and the pace of the kept tokens."""
    layers, count, ids, schedule = need(ltd, path, "total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id",
                                        "random_ltd_schedule")
    if count != layers - 2 or sorted(ids) != list(range(1, layers - 1)):
        key = "random_ltd_layer_num" if count != layers - 2 else "random_ltd_layer_id"
        raise ValueError(f"{path}.{key} must stand for the layers 1 to {layers - 2}, all but the first and the last")
    if part(ltd, "layer_token_lr_schedule")[1]:     # DeepSpeed reserves this section, and ends with an error
        raise ValueError(f"{path}.layer_token_lr_schedule.enabled must be false: here the learning rate counts "
                         "layer-tokens anyway; set it with --warmup_tokens, --decay_tokens and --lr_decay")
    path = f"{path}.random_ltd_schedule"
    start, end, _, config = need(schedule, path, "min_value", "max_value", "schedule_type", "schedule_config")
    if start > end:
        raise ValueError(f"{path}.min_value ({start}) must not be above max_value ({end})")
    steps, multiple = need(config, f"{path}.schedule_config", "require_steps", "seq_per_step")
    return [f"--n_layer={layers}", f"--ltd={start}..{end}:{steps}", f"--ltd_multiple={multiple}"]


def optimizer_flags(config):
    """optimizer and scheduler -> AdamW's settings and the rate, with DeepSpeed's defaults in so many words; without a
    scheduler the rate is level. Its steps are those that are made, whatever a step costs; here the first one counts as
    1, there as 0. (The loss scale has no hysteresis here: it falls at the first overflow.)"""
    flags, rate = [], 1e-3
    steady = ["--lr_decay=constant", "--warmup_tokens=0"] if "optimizer" in config and "scheduler" not in config else []
    if "optimizer" in config:
        need(config["optimizer"], "optimizer", "type")
        p = {"lr": rate, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
        p |= config["optimizer"].get("params", {})
        rate = p["lr"]
        flags = [f"--beta1={p['betas'][0]}", f"--beta2={p['betas'][1]}", f"--eps={p['eps']}",
                 f"--weight_decay={float(p['weight_decay'])}"]
    if "scheduler" in config:
        kind, params = need(config["scheduler"], "scheduler", "type", "params")
        need(params, "scheduler.params", "warmup_type")         # the default, log, is what ours cannot do
        rate = rate if kind == "WarmupCosineLR" else params.get("warmup_max_lr", 1e-3)
        flags += ["--lr_unit=steps", f"--warmup_tokens={params.get('warmup_num_steps', 1000)}steps"]
        if kind == "WarmupLR":
            flags.append("--lr_decay=constant")
        else:
            floor = rate * params.get("cos_min_ratio", 1e-4) if kind == "WarmupCosineLR" else 0.0
            flags += [f"--lr_decay={'cosine' if kind == 'WarmupCosineLR' else 'linear'}", f"--min_lr={floor:g}",
                      f"--decay_tokens={need(params, 'scheduler.params', 'total_num_steps')}steps"]
    return flags + steady + ([f"--learning_rate={rate}"] if flags else [])


def memory_flags(config):
    """zero_optimization, offloading and activation_checkpointing: where memory lies, which changes no number."""
    zero, flags = config.get("zero_optimization", {}), []
    if zero.get("stage", 0):
        flags.append(f"--parallel=zero{zero['stage']}")
        devices = {key: zero.get(key, {}).get("device", "none") for key in ("offload_param", "offload_optimizer")}
        devices = {key: device for key, device in devices.items() if device != "none"}
        if len(set(devices.values())) == 2:
            raise ValueError("zero_optimization.offload_param and offload_optimizer must name one device: here cpu "
                             "takes weights, gradients and moments to the host, and nvme the moments on to the disk")
        for key, device in list(devices.items())[:1]:
            flags.append("--offload=cpu" if device == "cpu" else
                         f"--offload=disk:{need(zero[key], f'zero_optimization.{key}', 'nvme_path')}")
    return flags + ["--recompute=block"] * ("activation_checkpointing" in config)


def all_flags(config):
    """A whole file that check() has passed -> its flags in order."""
    flags, pools, length = batch_flags(config) + optimizer_flags(config) + memory_flags(config), [], []
    if "gradient_clipping" in config:
        flags.append(f"--grad_clip={float(config['gradient_clipping'])}")
    if "seed" in config.get("data_efficiency", {}):
        flags.append(f"--seed={config['data_efficiency']['seed']}")
    half = [dtype for dtype, name in (("float16", "fp16"), ("bfloat16", "bf16")) if part(config, name)[1]]
    if len(half) == 2:
        raise ValueError("fp16.enabled and bf16.enabled are both true; keep one")
    flags += [f"--dtype={dtype}" for dtype in half]
    if half == ["float16"]:
        fp16 = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000} | config["fp16"]
        flags.append(f"--loss_scale={fp16['loss_scale']}:0" if fp16["loss_scale"] else
                     f"--loss_scale={2 ** fp16['initial_scale_power']}:{fp16['loss_scale_window']}")
    curriculum, on = part(config, CURRICULUM)
    older, older_on = part(config, "curriculum_learning")
    if on and older_on:
        raise ValueError(f"curriculum_learning and {CURRICULUM} are both enabled; keep one")
    if on:
        pools, length = metric_flags(need(curriculum, CURRICULUM, "curriculum_metrics"),
                                     f"{CURRICULUM}.curriculum_metrics")
    if older_on:
        need(older, "curriculum_learning", "curriculum_type")
        text, multiple = pace(older, "curriculum_learning")
        length = [f"--seqlen=truncate:{text}", f"--seqlen_multiple={multiple}"]
    ltd, on = part(config, LTD)
    drops = ltd_flags(ltd, LTD) if on else []
    # what is not there is switched off in so many words, because our defaults are on
    return flags + (pools or ["--pool=off"]) + (length or ["--seqlen=off"]) + (drops or ["--ltd=off"])


# -----------------------------------------------------------------------------
# the file


def no_twins(pairs):
    """A JSON object as a dict. Of two equal keys json would keep the last, and one metric of two would be lost."""
    keys = sorted(key for key, _ in pairs)
    for key, following in zip(keys, keys[1:]):
        if key == following:
            raise ValueError(f"the key {key} stands twice in one object; keep one")
    return dict(pairs)


def read_ds_config(path):
    """The flags that a DeepSpeed config file stands for: path (str or Path) -> list of str, always in the same order.

    Raises ValueError, one line that says what is wrong, where (dotted key) and what is needed: for a file that cannot
    be read or is not JSON, for a key that is not known, and for a setting that cannot be followed exactly."""
    def number(text):                                       # 1e6 is a whole number
        return int(float(text)) if float(text).is_integer() else float(text)
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8-sig"), parse_float=number, object_pairs_hook=no_twins)
        check(config, FILE)
        return all_flags(config)
    except OSError as e:
        raise ValueError(f"--ds_config={path} cannot be read: {e.strerror}") from None
    except json.JSONDecodeError as e:
        raise ValueError(f"--ds_config={path} is not JSON (comments are not read): {e}") from None
    except ValueError as e:
        raise ValueError(f"--ds_config={path}: {e}") from None


def command_line(cfg, given):
    """The arguments of train.py that --ds_config stands for, as a list; flags given beside it win. Prints them as a
    command. cfg: a parsed Config, given: the names of the flags on the command line."""
    win = given | {f"{name}_multiple" for name in given}        # without its technique a multiple has no effect
    for flag, idle in (("dtype", {"loss_scale"}), ("lr_decay", {"min_lr", "decay_tokens"}), ("parallel", {"offload"})):
        win |= idle if flag in given else set()
    theirs = [flag for flag in read_ds_config(cfg.ds_config) if flag[2:].partition("=")[0] not in win]
    if "RANK" not in os.environ:
        alone = [flag for flag in theirs if flag.startswith(("--parallel=", "--offload="))]
        if alone:
            print(f"{' '.join(alone)}: left out, for one process without torchrun shards nothing", file=sys.stderr)
        theirs = [flag for flag in theirs if flag not in alone]
    ours = flag_words(cfg, given - {"ds_config"})
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"--ds_config={cfg.ds_config} stands for:\n    python train.py {shlex.join(theirs + ours)}", flush=True)
    return theirs + ours
