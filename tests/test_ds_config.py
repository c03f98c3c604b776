"""ds_config.py: DeepSpeed's config files as our flags, and what is refused of them."""
import copy
import json

import numpy as np
import pytest
from conftest import ok, refused, train

from config import Config, plan_of
from curriculum import Pace
from ds_config import read_ds_config
from flags import parse_flags
from plan import make_plan

FILES = {"index_to_sample_path": "some/index_to_sample", "index_to_metric_path": "some/index_to_metric"}
POOL = {"difficulty_type": "percentile", "clustering_type": "schedule_based"}
LENGTH = {"difficulty_type": "value", "clustering_type": "single_cluster"}


def root(start, end, steps, multiple, degree):
    return {"min_difficulty": start, "max_difficulty": end, "schedule_type": "fixed_root",
            "schedule_config": {"total_curriculum_step": steps, "difficulty_step": multiple, "root_degree": degree}}


def discrete(levels, last):
    return {"min_difficulty": levels[0], "max_difficulty": levels[-1], "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": levels, "max_step": last}}


def linear(start, end, steps, multiple):
    return {"min_difficulty": start, "max_difficulty": end, "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": steps, "difficulty_step": multiple}}


def file_of(metrics=None, ltd=None, batch=512, micro=8, layers=24, multiple=16, mask="attention_mask"):
    """A file with the keys of the public templates. metrics: name -> settings, ltd: (min, max, steps), None: off."""
    low, high, steps = ltd or (2048, 2048, 1)
    dummy = {"dummy": {**LENGTH, **root(2048, 2048, 1, 1, 1)}}
    columns = {name: {**FILES, **settings} for name, settings in (metrics or dummy).items()}
    return {
        "train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "steps_per_print": 100,
        "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
        "dataloader_drop_last": True,
        "data_efficiency": {
            "enabled": True, "seed": 1234,
            "data_routing": {"enabled": bool(ltd), "random_ltd": {
                "enabled": bool(ltd), "total_layer_num": layers, "random_ltd_layer_num": layers - 2,
                "random_ltd_layer_id": list(range(1, layers - 1)), "model_mask_name": mask, "model_type": "decoder",
                "hidden_state_order": "seq_batch_dim",
                "random_ltd_schedule": {"min_value": low, "max_value": high, "schedule_type": "fixed_linear",
                                        "schedule_config": {"require_steps": steps, "seq_per_step": multiple}}}},
            "data_sampling": {"enabled": bool(metrics), "num_epochs": 1, "num_workers": 0, "curriculum_learning": {
                "enabled": bool(metrics), "data_cluster_path": "some/clusters", "curriculum_metrics": columns}}}}


@pytest.fixture
def flags(tmp_path):
    """read_ds_config of a dict, or of a file's text."""
    def read(config):
        path = tmp_path / "ds.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return read_ds_config(path)
    return read


GPT_CL = {"voc": {**POOL, **root(1, 100, 110_000, 1, 2)},
          "seqlen_truncate": {**LENGTH, **root(80, 2048, 110_000, 8, 1)}}
BERT_CL = {"voc": {**POOL, **root(5, 100, 960_000, 1, 2)},
           "seqlen_truncate": {**LENGTH, **root(128, 512, 960_000, 8, 1)}}
BERT_REORDER = {"seqlenvocabrarity": {**POOL, **root(5, 100, 960_000, 1, 2)}}
PTB = dict(batch=4, micro=4, multiple=8)
GPT_FLAGS = ["--global_batch=512", "--batch_size=8", "--grad_clip=1.0", "--seed=1234"]
RECIPES = {
    "gpt3-1.3b baseline": (file_of(), [
        *GPT_FLAGS, "--pool=off", "--seqlen=off", "--ltd=off"]),
    "gpt3-1.3b curriculum": (file_of(GPT_CL), [
        *GPT_FLAGS, "--pool=voc:1%..100%:110000:sqrt",
        "--seqlen=truncate:80..2048:110000", "--seqlen_multiple=8", "--ltd=off"]),
    "gpt3-1.3b ltd": (file_of(ltd=(128, 2048, 200_000)), [
        *GPT_FLAGS, "--pool=off", "--seqlen=off",
        "--n_layer=24", "--ltd=128..2048:200000", "--ltd_multiple=16"]),
    "gpt3-1.3b both": (file_of(GPT_CL, (128, 2048, 200_000)), [
        *GPT_FLAGS, "--pool=voc:1%..100%:110000:sqrt",
        "--seqlen=truncate:80..2048:110000", "--seqlen_multiple=8",
        "--n_layer=24", "--ltd=128..2048:200000", "--ltd_multiple=16"]),
    "bert-large both": (file_of(BERT_CL, (128, 512, 2_000_000), batch=1024, micro=16), [
        "--global_batch=1024", "--batch_size=16", "--grad_clip=1.0", "--seed=1234", "--pool=voc:5%..100%:960000:sqrt",
        "--seqlen=truncate:128..512:960000", "--seqlen_multiple=8",
        "--n_layer=24", "--ltd=128..512:2000000", "--ltd_multiple=16"]),
    "bert-large length then rarity": (file_of(BERT_REORDER, batch=1024, micro=16), [
        "--global_batch=1024", "--batch_size=16", "--grad_clip=1.0", "--seed=1234",
        "--pool=seqlen_voc:5%..100%:960000:sqrt", "--samples=document", "--seqlen=off", "--ltd=off"]),
    "gpt2-350m ptb reshape": (file_of({"seqlen_reshape": {**LENGTH, **root(32, 1024, 917, 8, 1)}}, **PTB), [
        "--global_batch=4", "--batch_size=4", "--grad_clip=1.0", "--seed=1234", "--pool=off",
        "--seqlen=reshape:32..1024:917", "--seqlen_multiple=8", "--ltd=off"]),
    "gpt2-350m ptb ltd": (file_of(ltd=(128, 1024, 393), **PTB), [
        "--global_batch=4", "--batch_size=4", "--grad_clip=1.0", "--seed=1234", "--pool=off", "--seqlen=off",
        "--n_layer=24", "--ltd=128..1024:393", "--ltd_multiple=8"]),
    "gpt2-350m ptb both": (file_of({"seqlen_reshape": {**LENGTH, **root(32, 1024, 131, 8, 1)}},
                                   (128, 1024, 393), **PTB), [
        "--global_batch=4", "--batch_size=4", "--grad_clip=1.0", "--seed=1234", "--pool=off",
        "--seqlen=reshape:32..1024:131", "--seqlen_multiple=8",
        "--n_layer=24", "--ltd=128..1024:393", "--ltd_multiple=8"]),
    "vit ltd": (file_of(ltd=(32, 197, 3910), batch=32, micro=32, layers=12, multiple=8, mask=None), [
        "--global_batch=32", "--batch_size=32", "--grad_clip=1.0", "--seed=1234", "--pool=off", "--seqlen=off",
        "--n_layer=12", "--ltd=32..197:3910", "--ltd_multiple=8"])}


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_becomes_the_flags_one_would_write(flags, name):
    config, want = RECIPES[name]
    assert flags(config) == want
    for flag, text in (f[2:].split("=", 1) for f in want):
        if flag in ("pool", "seqlen", "ltd") and text != "off":
            assert Pace.parse(text, f"--{flag}", named=flag != "ltd").start > 0


def test_the_flags_of_the_gpt3_recipe_take_the_published_steps(flags):
    given = dict(f[2:].split("=", 1) for f in flags(RECIPES["gpt3-1.3b both"][0]))
    numbers = {k: int(given[k]) for k in ("global_batch", "n_layer", "seqlen_multiple", "ltd_multiple")}
    p = make_plan(train_tokens=int(300e9), budget="layer_tokens", block_size=2048, **numbers, pool=[given["pool"]],
                  seqlen=given["seqlen"], ltd=given["ltd"], learning_rate=2e-4, min_lr=1e-6, warmup_tokens="3e9",
                  decay_tokens="100%", lr_decay="cosine", lr_unit="")
    assert p.steps == 377_264


@pytest.mark.parametrize("name,settings,want", [
    ("vocabularyrarity", POOL, ["--pool=voc:1%..100%:9:sqrt"]),
    ("vocab_rarity", POOL, ["--pool=voc:1%..100%:9:sqrt"]),
    ("seqlen", POOL, ["--pool=seqlen:1%..100%:9:sqrt", "--samples=document"]),
    ("seqlen_vocab_rarity", POOL, ["--pool=seqlen_voc:1%..100%:9:sqrt", "--samples=document"]),
    ("seqlenvocabularyrarity", POOL, ["--pool=seqlen_voc:1%..100%:9:sqrt", "--samples=document"]),
    ("rhymes", {**POOL, "difficulty_type": "value"}, ["--pool=rhymes:1..100:9:sqrt"])])
def test_a_metric_becomes_a_pool_over_its_column(flags, name, settings, want):
    assert flags(file_of({name: {**settings, **root(1, 100, 9, 1, 2)}}))[4:] == [*want, "--seqlen=off", "--ltd=off"]


def test_metrics_keep_their_order_and_intersect(flags):
    got = flags(file_of({"b": {**POOL, **linear(1, 100, 9, 1)}, "seqlen": {**LENGTH, **linear(8, 64, 9, 8)},
                         "a": {**POOL, **root(2, 100, 9, 1, 3)}}))
    assert got[4:] == ["--pool=b:1%..100%:9", "--pool=a:2%..100%:9:root3",
                       "--seqlen=truncate:8..64:9", "--seqlen_multiple=8", "--ltd=off"]


@pytest.mark.parametrize("schedule,want", [
    (linear(8, 1024, 40_000, 8), ["--seqlen=truncate:8..1024:40000", "--seqlen_multiple=8"]),
    (root(8, 1024, 4e4, 16, 2), ["--seqlen=truncate:8..1024:40000:sqrt", "--seqlen_multiple=16"]),
    (discrete([1, 2, 3], [5, 10]), ["--seqlen=truncate:1..3:10:1@4,2@9", "--seqlen_multiple=1"])],
    ids=["linear", "root", "discrete"])
def test_the_older_section_is_a_truncation(flags, schedule, want):
    older = {"enabled": True, "curriculum_type": "seqlen", **schedule}
    assert flags({"curriculum_learning": older}) == ["--pool=off", *want, "--ltd=off"]


@pytest.mark.parametrize("config", [{}, {"data_efficiency": {}}, {"curriculum_learning": {"enabled": False}},
                                    {"data_efficiency": {"enabled": True}}],
                         ids=["empty", "section", "older", "enabled"])
def test_what_is_absent_is_off(flags, config):
    assert flags(config) == ["--pool=off", "--seqlen=off", "--ltd=off"]


@pytest.mark.parametrize("switch", ["data_efficiency", "data_efficiency.data_sampling",
                                    "data_efficiency.data_sampling.curriculum_learning"])
def test_a_curriculum_is_off_when_any_switch_above_it_is(flags, switch):
    config = file_of(GPT_CL, (128, 2048, 9))
    change(config, f"{switch}.enabled", False)
    assert flags(config)[4:6] == ["--pool=off", "--seqlen=off"]


# DeepSpeed's difficulty at its own steps, which begin at 1, for difficulty [16, 33, 100] and max_step [100, 500]
DEEPSPEED = {1: 16, 2: 16, 99: 16, 100: 16, 101: 33, 102: 33, 499: 33, 500: 33, 501: 100, 502: 100, 9999: 100}


@pytest.mark.parametrize("name,settings", [("voc", POOL), ("rhymes", {**POOL, "difficulty_type": "value"}),
                                           ("seqlen_truncate", LENGTH)])
def test_discrete_levels_are_deepspeeds_at_every_step(flags, name, settings):
    config = file_of({name: {**settings, **discrete([16, 33, 100], [100, 500])}})
    given = dict(f[2:].split("=", 1) for f in flags(config))
    ours = [step - 1 for step in DEEPSPEED]             # we count from 0
    if name == "seqlen_truncate":
        got = Pace.parse(given["seqlen"], "--seqlen").at(ours, 9999, int(given["seqlen_multiple"]), whole=128)
    else:
        got = Pace.parse(given["pool"]).limit(ours, 9999)
    assert got.tolist() == list(DEEPSPEED.values())


def test_numbers_may_be_written_as_floats_and_clipping_may_be_off(flags):
    written = '{"train_batch_size": 5.12e2, "gradient_clipping": 0}'
    assert flags(written)[:2] == ["--global_batch=512", "--grad_clip=0.0"]
    assert flags('{"gradient_clipping": 0.5}')[0] == "--grad_clip=0.5"


def test_gradient_accumulation_is_accepted_where_it_is_consistent(flags):
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    assert flags(config)[:2] == ["--global_batch=64", "--batch_size=4"]
    assert flags({"train_batch_size": 64, "gradient_accumulation_steps": 8})[:2] == ["--global_batch=64", "--pool=off"]


def test_keys_that_only_log_are_accepted(flags):
    quiet = {"steps_per_print": 10, "memory_breakdown": True, "dump_state": False, "csv_monitor": {}, "comet": {},
             "tensorboard": {"enabled": True, "output_path": "x"}, "wandb": {"enabled": False},
             "comms_logger": {"enabled": False}, "flops_profiler": {"enabled": True, "profile_step": 1}}
    assert flags(quiet) == flags({})


DE = "data_efficiency"
CL, DROP = f"{DE}.data_sampling.curriculum_learning", f"{DE}.data_routing.random_ltd"
VOC, LEN = f"{CL}.curriculum_metrics.voc", f"{CL}.curriculum_metrics.seqlen_truncate"
KEEP = f"{DROP}.random_ltd_schedule"
LR = {"enabled": True, "total_layer_tokens": 9, "warmup_type": "linear", "warmup_layer_tokens": 1}
NOTHING = object()


def change(config, path, value):
    """Set config[a][b][c] for the path a.b.c; NOTHING deletes it."""
    *above, key = path.split(".")
    for name in above:
        config = config.setdefault(name, {})
    config.pop(key, None) if value is NOTHING else config.update({key: value})


@pytest.mark.parametrize("path,value,words", [
    # keys that are not known, anywhere, on or off
    ("foo", 1, ["foo is not known; known there: train_batch_size, "]),
    ("optimizer", {}, ["optimizer.type is missing"]), ("optimizer", {"type": "Lamb"}, ["optimizer.type must be Adam or AdamW"]),
    ("optimizer", {"type": "AdamW", "params": {"lr": "auto"}}, ["optimizer.params.lr must be a number"]),
    ("optimizer", {"type": "Adam", "params": {"adam_w_mode": False}}, ["adam_w_mode must be true"]),
    ("optimizer", {"type": "Adam", "params": {"betas": [0.9]}}, ["betas must be two numbers"]),
    ("scheduler", {"type": "WarmupLR", "params": {}}, ["scheduler.params.warmup_type is missing"]),
    ("scheduler", {"type": "WarmupLR", "params": {"warmup_type": "log"}}, ["warmup_type must be linear"]),
    ("scheduler", {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}}, ["total_num_steps is missing"]),
    ("scheduler", {"type": "OneCycle"}, ["WarmupCosineLR"]),
    ("zero_optimization", {"stage": 4}, ["zero_optimization.stage must be 0 or 1"]),
    ("zero_optimization", {"stage": 3, "offload_param": {"device": "nvme"}}, ["zero_optimization.offload_param.nvme_path is missing"]),
    ("activation_checkpointing", {"cpu_checkpointing": True}, ["cpu_checkpointing must be false"]),
    (f"{DE}.foo", 1, [f"{DE}.foo is not known; known there: enabled, seed, data_sampling, data_routing"]),
    (f"{DE}.data_sampling.foo", 1, [f"{DE}.data_sampling.foo is not known; known there: enabled, num_epochs, "]),
    (f"{VOC}.foo", 1, [f"{VOC}.foo is not known"]),
    (f"{VOC}.schedule_config.foo", 1, [f"{VOC}.schedule_config.foo is not known"]),
    (f"{DROP}.foo", 1, [f"{DROP}.foo is not known"]),
    (f"{KEEP}.schedule_config.foo", 1, [f"{KEEP}.schedule_config.foo is not known"]),
    ("curriculum_learning", {"enabled": False, "foo": 1}, ["curriculum_learning.foo is not known"]),
    # types and ranges
    ("train_batch_size", "auto", ["train_batch_size must be a whole number, 1 or more, not \"auto\""]),
    ("train_batch_size", True, ["train_batch_size", "not true"]),
    ("train_micro_batch_size_per_gpu", 0, ["train_micro_batch_size_per_gpu", "1 or more, not 0"]),
    ("gradient_clipping", -1, ["gradient_clipping must be a number, 0 or more, not -1"]),
    ("gradient_clipping", float("nan"), ["gradient_clipping", "not NaN"]),
    (DE, [], [f"{DE} must be an object"]),
    (f"{DE}.enabled", "true", [f"{DE}.enabled must be true or false"]),
    (f"{DE}.seed", 1.5, [f"{DE}.seed must be a whole number"]),
    (f"{DROP}", None, [f"{DROP} must be an object, {{...}}, not null"]),
    (f"{VOC}.min_difficulty", -1, [f"{VOC}.min_difficulty", "0 or more"]),
    (f"{VOC}.difficulty_type", "quantile", [f"{VOC}.difficulty_type must be value or percentile"]),
    (f"{VOC}.schedule_type", "fixed_sqrt", [f"{VOC}.schedule_type must be fixed_linear or"]),
    (f"{VOC}.schedule_config.root_degree", 0, ["root_degree", "1 or more"]),
    (f"{VOC}.schedule_config.total_curriculum_step", 0.5, ["total_curriculum_step", "not 0.5"]),
    (f"{DROP}.random_ltd_layer_id", "1-22", [f"{DROP}.random_ltd_layer_id must be a list of whole numbers"]),
    (f"{KEEP}.schedule_type", "fixed_root", [f"{KEEP}.schedule_type must be fixed_linear"]),
    # keys that must be there
    ("train_batch_size", NOTHING, ["train_batch_size is missing"]),
    (f"{CL}.curriculum_metrics", NOTHING, [f"{CL}.curriculum_metrics is missing"]),
    (f"{VOC}.clustering_type", NOTHING, [f"{VOC}.clustering_type is missing"]),
    (f"{VOC}.max_difficulty", NOTHING, [f"{VOC}.max_difficulty is missing"]),
    (f"{VOC}.schedule_config", NOTHING, [f"{VOC}.schedule_config is missing"]),
    (f"{VOC}.schedule_config.root_degree", NOTHING, [f"{VOC}.schedule_config.root_degree is missing"]),
    (f"{DROP}.total_layer_num", NOTHING, [f"{DROP}.total_layer_num is missing"]),
    (f"{KEEP}", NOTHING, [f"{KEEP} is missing"]),
    (f"{KEEP}.schedule_config.seq_per_step", NOTHING, [f"{KEEP}.schedule_config.seq_per_step is missing"]),
    # settings that cannot be followed
    ("gradient_accumulation_steps", 7, ["train_batch_size (512)", "gradient_accumulation_steps (8 x 7)"]),
    ("curriculum_learning", {"enabled": True, "curriculum_type": "seqlen", **linear(8, 64, 9, 8)}, ["both enabled"]),
    (f"{VOC}.min_difficulty", 101, [f"{VOC}.min_difficulty (101)", "max_difficulty (100)"]),
    (f"{VOC}.max_difficulty", 50, [f"{VOC}.max_difficulty must be 100"]),
    (f"{VOC}.schedule_type", "custom", [f"{VOC}.schedule_type", "FILE.py:FUNCTION"]),
    (f"{VOC}.schedule_config.difficulty_step", 2, [f"{VOC}.schedule_config.difficulty_step must be 1, not 2"]),
    (f"{VOC}.clustering_type", "single_cluster", [f"{VOC}.clustering_type must be schedule_based"]),
    (f"{LEN}.difficulty_type", "percentile", [LEN, "difficulty_type value"]),
    (f"{LEN}.clustering_type", "schedule_based", [LEN, "single_cluster"]),
    (f"{CL}.curriculum_metrics.seqlen_reshape", {**LENGTH, **linear(8, 64, 9, 8)},
     ["seqlen_reshape", "another metric paces the length already"]),
    (f"{CL}.curriculum_metrics.my-metric", {**POOL, **linear(1, 100, 9, 1)}, ["my-metric", "FILE.py:NAME"]),
    (VOC, {**POOL, **discrete([1, 50, 100], [10])}, [f"{VOC}.schedule_config.max_step", "one entry less"]),
    (VOC, {**POOL, **discrete([1, 50, 100], [20, 10])}, [f"{VOC}.schedule_config.max_step must rise"]),
    (VOC, {**POOL, **discrete([1, 100], [0])}, [f"{VOC}.schedule_config.max_step"]),
    (VOC, {**POOL, **discrete([1, 60, 50, 100], [1, 2, 3])}, [f"{VOC}.schedule_config.difficulty must rise"]),
    (VOC, {**POOL, **discrete([1, 100], [5]), "min_difficulty": 2}, [f"{VOC}.schedule_config.difficulty must rise"]),
    (f"{DROP}.random_ltd_layer_num", 21, [f"{DROP}.random_ltd_layer_num", "1 to 22"]),
    (f"{DROP}.random_ltd_layer_id", list(range(22)), [f"{DROP}.random_ltd_layer_id", "1 to 22"]),
    (f"{DROP}.layer_token_lr_schedule", LR, [f"{DROP}.layer_token_lr_schedule.enabled must be false", "--warmup_tok"]),
    (f"{KEEP}.min_value", 4096, [f"{KEEP}.min_value (4096)", "max_value (2048)"])])
def test_a_setting_is_refused_in_one_line_that_names_it(flags, tmp_path, path, value, words):
    config = copy.deepcopy(RECIPES["gpt3-1.3b both"][0])
    change(config, path, value)
    with pytest.raises(ValueError) as e:
        flags(config)
    assert str(e.value).startswith(f"--ds_config={tmp_path / 'ds.json'}: ") and "\n" not in str(e.value)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_a_step_of_a_pool_that_changes_nothing_is_accepted(flags):
    config = file_of({"voc": {**POOL, **root(100, 100, 9, 8, 1)}})
    assert flags(config)[4] == "--pool=voc:100%..100%:9"


def test_a_layer_token_schedule_that_is_off_is_accepted(flags):
    config, want = copy.deepcopy(RECIPES["gpt3-1.3b ltd"])
    change(config, f"{DROP}.layer_token_lr_schedule", {**LR, "enabled": False})
    assert flags(config) == want


@pytest.mark.parametrize("text,word", [
    ("{", "is not JSON"), ("", "is not JSON"), ('{"a": 1} // comment', "comments are not read"),
    ("[]", "the file must be an object"),
    ('{"steps_per_print": 1, "steps_per_print": 2}', "the key steps_per_print stands twice")],
    ids=["cut", "empty", "comment", "list", "twins"])
def test_a_file_that_is_no_config_is_refused(flags, text, word):
    with pytest.raises(ValueError, match=word) as e:
        flags(text)
    assert "\n" not in str(e.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=f"--ds_config={path} cannot be read: "):
            read_ds_config(path)


def test_half_precision_is_followed_with_its_loss_scale(flags):
    config = file_of() | {"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}, "bf16": {"enabled": False}}
    assert {"--dtype=float16", "--loss_scale=65536:1000"} <= set(flags(config))
    config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 50}
    assert "--loss_scale=256:50" in flags(config)
    config["fp16"]["loss_scale"] = 128
    assert "--loss_scale=128:0" in flags(config)
    with pytest.raises(ValueError, match="both true"):
        flags(config | {"bf16": {"enabled": True}})
    config |= {"fp16": {"enabled": False}, "bf16": {"enabled": True}}
    assert "--dtype=bfloat16" in flags(config) and not any("loss_scale" in flag for flag in flags(config))


def test_where_memory_lies_is_followed(flags):
    def memory(**zero):
        return [flag for flag in flags(file_of() | {"zero_optimization": zero}) if flag.startswith(("--parallel", "--offload"))]
    assert memory(stage=0) == [] and memory(stage=2, overlap_comm=True) == ["--parallel=zero2"]
    assert memory(stage=3, offload_param={"device": "cpu"}, offload_optimizer={"device": "none"}) == ["--parallel=zero3", "--offload=cpu"]
    assert memory(stage=1, offload_optimizer={"device": "nvme", "nvme_path": "/fast"}) == ["--parallel=zero1", "--offload=disk:/fast"]
    assert "--recompute=block" in flags(file_of() | {"activation_checkpointing": {"number_checkpoints": 4}})


def rates(words, steps, T=8, B=4, **kw):
    """The learning rates of a run of plain steps under these flags."""
    cfg, _ = parse_flags(Config, [*words, "--pool=off", "--seqlen=off", "--ltd=off", f"--train_tokens={steps * T * B}", f"--block_size={T}", f"--global_batch={B}"], "")
    cfg.min_lr = max(cfg.min_lr, 0.0)
    return cfg, plan_of(cfg, None).lr


def test_optimizer_and_scheduler_give_deepspeeds_rates(flags):
    """WarmupDecayLR and WarmupCosineLR as its documentation defines them, at steps counted from 1; DeepSpeed's defaults are said."""
    def ours(scheduler, **params):
        config = file_of() | {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.8, 0.99]}}}
        config |= {"scheduler": {"type": scheduler, "params": {"warmup_type": "linear", "warmup_num_steps": 10, **params}}} if scheduler else {}
        words = [w for w in flags(config) if w.partition("=")[0] in ("--learning_rate", "--min_lr", "--lr_decay", "--lr_unit", "--warmup_tokens", "--decay_tokens", "--beta1", "--beta2", "--eps",
                                                                      "--weight_decay")]
        return rates(words, 50)
    t = np.arange(1, 51)
    cfg, _ = ours(None)
    assert (cfg.learning_rate, cfg.beta1, cfg.beta2, cfg.eps, cfg.weight_decay) == (2e-3, 0.8, 0.99, 1e-8, 0.0)
    assert ours("WarmupLR", warmup_max_lr=3e-3)[1] == pytest.approx(3e-3 * np.minimum(1, t / 10))
    assert ours("WarmupDecayLR", warmup_max_lr=3e-3, total_num_steps=50)[1] == pytest.approx(3e-3 * np.minimum(t / 10, (50 - t) / 40))
    cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * (t - 10) / 40)) / 2
    assert ours("WarmupCosineLR", cos_min_ratio=0.1, total_num_steps=50)[1] == pytest.approx(2e-3 * np.where(t < 10, t / 10, cosine))


def test_train_takes_the_file_prints_the_command_and_flags_beside_it_win(tmp_path):
    """The published recipe for GPT-3 1.3B at 300B tokens, both techniques: 377,264 steps; without the length curriculum, more."""
    ds = tmp_path / "ds.json"
    ds.write_text(json.dumps(RECIPES["gpt3-1.3b both"][0]))
    flags = ["--plan", f"--ds_config={ds}", "--model=gpt3-1.3b", "--train_tokens=300e9", "--warmup_tokens=3e9", "--min_lr=1e-6", "--learning_rate=2e-4"]
    printed = ok(train(*flags))
    assert "\nsteps: 377264\nplain_steps: 286103\n" in printed
    again = next(line for line in printed.splitlines() if "python train.py" in line).split()[2:]
    assert "--pool=voc:1%..100%:110000:sqrt" in again and "--seqlen=truncate:80..2048:110000" in again and not any("ds_config" in word for word in again)
    assert ok(train(*again)).splitlines()[-30:] == printed.splitlines()[-30:]
    assert "\nsteps: 372789\n" in ok(train(*flags, "--pool=off", "--seqlen=off"))
    refused(train(*flags[:2], "--model=gpt2"), "24", "--n_layer", "total_layer_num")
    refused(train("--plan", f"--ds_config={tmp_path}/none.json"), "none.json cannot be read")
