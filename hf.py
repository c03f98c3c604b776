"""GPT-2, BERT and ViT in Hugging Face's layout (config.json, model.safetensors), in and out:

    python train.py --init_from=FOLDER --data=data/mine --out=out/mine      fine-tune it (text: with its tokenizer)
    python train.py --resume --out=out/mine --export=hf:FOLDER              write it back, for transformers and the rest
    python train.py --init_from=model.pt --data=data/other ...              the same from a checkpoint of ours

Ours have one c_attn, a head's query, key and value after another's (so that tensor parallelism cuts whole heads);
theirs make all queries, then all keys, then all values (GPT-2) or have a matrix for each. GPT-2's matrices are stored
input by output. The numbers are the same. Weights are safetensors: nothing that is read can run code.
"""
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F

from data import write_atomic
from output import print0

# of a family: theirs of config.json by our flags; what must be so for the model to be ours
FLAGS = {
    "gpt": {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"},
    "bert": {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
             "block_size": "max_position_embeddings"},
    "vit": {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
            "image_size": "image_size", "patch_size": "patch_size"}}
NEEDED = {
    "gpt": {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True,
            "n_inner": None},
    "bert": {"model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2,
             "is_decoder": False, "tie_word_embeddings": True, "position_embedding_type": "absolute"},
    "vit": {"model_type": "vit", "hidden_act": "gelu", "layer_norm_eps": 1e-12, "qkv_bias": True}}
SETTINGS = {"gpt": {"gelu": "tanh", "norm": "pre"}, "bert": {"gelu": "none", "norm": "post"},
            "vit": {"gelu": "none", "norm": "pre"}}       # what the family's models are of ours, beside biases
TYPES = {"gpt2": "gpt", "bert": "bert", "vit": "vit"}
PREFIX = {"gpt": "transformer.", "bert": "bert.", "vit": "vit."}

# our modules: theirs, with bias where ours has one; ends (what a task brings with it) may be missing
ENDS = {
    "gpt": {"wte": ["wte"], "wpe": ["wpe"], "ln_f": ["ln_f"]},
    "bert": {"wte": ["embeddings.word_embeddings"], "wpe": ["embeddings.position_embeddings"],
             "wse": ["embeddings.token_type_embeddings"], "ln_0": ["embeddings.LayerNorm"], "pooler": ["pooler.dense"],
             "pair_head": ["/cls.seq_relationship"], "transform.dense": ["/cls.predictions.transform.dense"],
             "transform.ln": ["/cls.predictions.transform.LayerNorm"]},
    "vit": {"patch": ["embeddings.patch_embeddings.projection"], "ln_f": ["layernorm"], "head": ["/classifier"]}}
OWN = {"vit": {"cls": "embeddings.cls_token", "wpe.weight": "embeddings.position_embeddings"}}
LAYERS = {
    "gpt": ("h", {"ln_1": ["ln_1"], "c_attn": ["attn.c_attn"], "attn_proj": ["attn.c_proj"], "ln_2": ["ln_2"],
                  "c_fc": ["mlp.c_fc"], "mlp_proj": ["mlp.c_proj"]}),
    "bert": ("encoder.layer", {"c_attn": [f"attention.self.{x}" for x in ("query", "key", "value")],
                               "attn_proj": ["attention.output.dense"], "ln_1": ["attention.output.LayerNorm"],
                               "c_fc": ["intermediate.dense"], "mlp_proj": ["output.dense"],
                               "ln_2": ["output.LayerNorm"]}),
    "vit": ("encoder.layer", {"c_attn": [f"attention.attention.{x}" for x in ("query", "key", "value")],
                              "attn_proj": ["attention.output.dense"], "ln_1": ["layernorm_before"],
                              "c_fc": ["intermediate.dense"], "mlp_proj": ["output.dense"],
                              "ln_2": ["layernorm_after"]})}
OPTIONAL = ("head.", "pooler.", "pair_head.", "transform.")


def theirs_of(ours, family, n_labels):
    """The names under which their files hold our parameter `ours`: one, or three for c_attn."""
    if ours in OWN.get(family, {}):
        return [PREFIX[family] + OWN[family][ours]]
    module, _, kind = ours.rpartition(".")
    prefix = PREFIX[family]
    if module.startswith("blocks."):
        _, i, name = module.split(".")
        stack, layer = LAYERS[family]
        return [f"{prefix}{stack}.{i}.{theirs}.{kind}" for theirs in layer[name]]
    if family == "bert" and module == "head":
        return [f"classifier.{kind}" if n_labels else f"cls.predictions.{kind}"]
    return [f"{prefix}{theirs}.{kind}" if theirs[0] != "/" else f"{theirs[1:]}.{kind}"
            for theirs in ENDS[family][module]]


def swap(t, a, b):
    """(a * b * D, ...) rows, a groups of b -> b groups of a. By swap(t, 3, n_head) queries, keys and values go head by
    head; swap(t, n_head, 3) is the way back."""
    return t.view(a, b, -1, *t.shape[1:]).transpose(0, 1).reshape(t.shape)         # (a, b, D, ...) -> (b, a, D, ...)


def turned(ours, family):
    """Whether they store the matrix the other way round."""
    return family == "gpt" and ours.startswith("blocks.") and ours.endswith(".weight") and ".ln_" not in ours


def read_config(source):
    """The flags that a model stands for, and "vocab_size" where it has one. source: a folder of theirs, or a .pt of
    ours. ValueError for a model that is none of the families."""
    if str(source).endswith(".pt"):
        saved = _ours(source)
        flags = {k: saved["config"][k] for k in ("n_layer", "n_head", "n_embd", "block_size", "bias", "gelu", "pos")}
        flags |= {k: saved["config"].get(k, old) for k, old in (("arch", "gpt"), ("norm", "pre"), ("n_expert", 0))}
        more = {"gpt": (), "bert": (), "vit": ("image_size", "patch_size")}[flags["arch"]]
        if flags["n_expert"]:
            more = (*more, "expert_top_k", "moe_every")
        return flags | {k: saved["config"][k] for k in more} | {"vocab_size": saved["vocab_size"]}
    try:
        config = json.loads((Path(source) / "config.json").read_text())
        if not isinstance(config, dict):
            raise TypeError("no object")
    except (OSError, TypeError, ValueError) as e:
        raise ValueError(f"--init_from={source} needs a folder with config.json and model.safetensors, or a .pt file "
                         f"of ours ({type(e).__name__})") from None
    family = TYPES.get(config.get("model_type"), "gpt")
    flags = FLAGS[family]
    for key, value in NEEDED[family].items():
        if config.get(key, value) != value and not (key == "n_inner" and config[key] == 4 * config["n_embd"]):
            raise ValueError(f"--init_from={source}: {key} is {config[key]!r}; only {NEEDED[family]['model_type']} "
                             f"with {value!r} is read (of gpt2, bert and vit)")
    missing = [key for key in (*flags.values(), *["vocab_size"] * (family != "vit"))
               if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"--init_from={source}: its config.json lacks {', '.join(missing)}, or has no whole "
                         "number there")
    if family != "gpt" and config.get("intermediate_size", 4 * config["hidden_size"]) != 4 * config["hidden_size"]:
        raise ValueError(f"--init_from={source}: intermediate_size is {config['intermediate_size']}; only four times "
                         "hidden_size is read")
    return {ours: config[theirs] for ours, theirs in flags.items()} | SETTINGS[family] | {
        "arch": family, "bias": True, "pos": "learned"} | (
        {"vocab_size": config["vocab_size"]} if family != "vit" else
        {"block_size": (config["image_size"] // config["patch_size"]) ** 2 + 1})


def _ours(file):
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return saved if {"config", "model", "vocab_size"} <= saved.keys() else {}["config"]
    except Exception as e:      # torch.load raises whatever the damage makes of it
        raise ValueError(f"--init_from={file} is no checkpoint of train.py ({type(e).__name__}); of a folder of "
                         "shards make one: python train.py --resume --out=RUN --export=model.pt") from None


def files(folder):
    """Tensor name -> the safetensors file that holds it; big models have several. Old names of LayerNorm are renewed,
    and names without the model's prefix, as a bare model is saved, get it."""
    from safetensors import SafetensorError, safe_open
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ValueError(f"--init_from={folder} holds no *.safetensors; pickled weights are not read: write them anew "
                         "with transformers' save_pretrained()")
    where = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as f:
                names = list(f.keys())
        except (SafetensorError, OSError) as e:
            raise ValueError(f"--init_from={folder}: {path.name} is damaged ({e}); fetch it again") from None
        for name in names:
            new = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            bare = not new.startswith((*PREFIX.values(), "cls.", "classifier.", "lm_head."))
            for prefix in PREFIX.values() if bare else ("",):
                where[prefix + new] = (path, name)
    return where


@torch.no_grad()
def load(source, model, family="gpt", n_labels=0):
    """Fill a model of the source's shape, or with a shorter context, in place. Ends that it lacks, or that are of
    another task, stay as they were initialised, and a line says so."""
    theirs = str(source).endswith(".pt")
    content = _ours(source)["model"] if theirs else files(source)
    n_head, new = model.blocks[0].n_head, []

    def read(name):
        from safetensors import safe_open
        path, there = content[name]
        with safe_open(path, "pt") as f:
            return f.get_tensor(there)
    for ours, p in model.named_parameters():
        names = [ours] if theirs else theirs_of(ours, family, n_labels)
        if any(name not in content for name in names):
            if ours.startswith(OPTIONAL):
                new.append(ours)
                continue
            raise ValueError(f"--init_from={source} lacks {names[0].removeprefix(PREFIX[family])}")
        if theirs:
            t = content[ours]
        else:
            t = torch.cat([read(name) for name in names])
            t = t.T if turned(ours, family) else t
            t = swap(t.contiguous(), 3, n_head) if ".c_attn." in ours else t
            t = t.flatten(1) if ours == "patch.weight" else t.squeeze(0) if ours == "wpe.weight" else t
        if ours == "wpe.weight" and family == "vit" and len(t) != len(p):       # another image size: a finer grid
            old, size = (round((len(x) - 1) ** .5) for x in (t, p))
            grid = t[1:].T.reshape(1, -1, old, old)                             # (T-1, C) -> (1, C, S/P, S/P)
            grid = F.interpolate(grid, (size, size), mode="bicubic").flatten(2)[0].T
            t = torch.cat((t[:1], grid))
        elif ours == "wpe.weight":
            t = t[:len(p)]
        if t.shape != p.shape:
            if ours.startswith(OPTIONAL):
                new.append(ours)
                continue
            raise ValueError(f"--init_from={source}: {names[0].removeprefix(PREFIX[family])} has the shape "
                             f"{tuple(t.shape)}, not {tuple(p.shape)}"
                             + "; encode the text with its vocabulary: python data_analyze.py --tokenizer="
                             f"{'gpt2' if family == 'gpt' else 'vocab.txt'} ..." * (ours == "wte.weight"))
        p.copy_(t)
    if new:
        print0(f"--init_from={source}: not in it, so drawn: {', '.join(new)}")


def save(model, config, folder):
    """Write a model of theirs' settings as transformers' GPT2LMHeadModel, BertForMaskedLM (BertForPreTraining with
    --nsp), BertForSequenceClassification or ViTForImageClassification. config: of train.py, a dict."""
    from safetensors.torch import save as to_bytes
    family, n_labels = config.get("arch", "gpt"), getattr(model, "n_labels", 0)
    kind, wanted = NEEDED[family]["model_type"], SETTINGS[family] | {"bias": True, "pos": "learned"}
    if config.get("n_expert") or any(config.get(k, "pre") != v for k, v in wanted.items()):
        raise ValueError(f"--export=hf: only a model with --bias --gelu={wanted['gelu']} --pos=learned --norm="
                         f"{wanted['norm']} and no experts is {kind}; this one has bias {config['bias']}, gelu "
                         f"{config['gelu']}, pos {config['pos']}, norm {config.get('norm', 'pre')}; --export=model.pt "
                         "takes any")
    tensors = {}
    for ours, p in model.named_parameters():
        t, names = p.detach(), theirs_of(ours, family, n_labels)
        t = swap(t, config["n_head"], 3) if ".c_attn." in ours else t
        t = t.T if turned(ours, family) else t
        t = t.view(len(t), -1, *[config["patch_size"]] * 2) if ours == "patch.weight" else t
        t = t[None] if ours == "wpe.weight" and family == "vit" else t
        tensors |= {name: part.contiguous() for name, part in zip(names, t.chunk(len(names)))}
    architecture = {"gpt": "GPT2LMHeadModel", "vit": "ViTForImageClassification",
                    "bert": "BertForSequenceClassification" if n_labels else
                            "BertForPreTraining" if config.get("nsp") else "BertForMaskedLM"}[family]
    about = {k: v for k, v in NEEDED[family].items() if v is not None} | {
        "architectures": [architecture], "torch_dtype": "float32",
        **{theirs: config[ours] for ours, theirs in FLAGS[family].items()}}
    about |= {"gpt": lambda: {"n_ctx": config["block_size"]}, "bert": lambda: {
        "intermediate_size": 4 * config["n_embd"], "num_labels": n_labels or 2}, "vit": lambda: {
        "intermediate_size": 4 * config["n_embd"], "num_labels": n_labels, "num_channels": model.patch.in_features
        // config["patch_size"] ** 2}}[family]()
    if family != "vit":
        about["vocab_size"] = len(model.wte.weight)
    os.makedirs(folder, exist_ok=True)
    write_atomic(Path(folder) / "config.json", lambda f: f.write(json.dumps(about, indent=1).encode()))
    write_atomic(Path(folder) / "model.safetensors", lambda f: f.write(to_bytes(tensors, {"format": "pt"})))
