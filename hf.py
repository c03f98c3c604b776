"""GPT-2 in Hugging Face's layout (config.json, model.safetensors), in and out:

    python train.py --init_from=FOLDER --data=data/mine --out=out/mine      fine-tune it (text: --tokenizer=gpt2)
    python train.py --resume --out=out/mine --export=hf:FOLDER              write it back, for transformers and the rest

Their matrices are stored input by output, ours output by input; their c_attn makes all queries, then all keys, then all
values, ours a head's query, key and value after another's (so that tensor parallelism cuts whole heads). The numbers
are the same. Weights are safetensors: nothing that is read can run code.
"""
import json
import os
from pathlib import Path

import torch

from data import write_atomic

# what of config.json must be so for the model to be ours
NEEDED = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
          "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True,
          "n_inner": None}
SIZES = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"}     # ours: theirs


def names(n_layer):
    """(ours, theirs, whether it is stored the other way round) for every tensor."""
    yield from (("wte.weight", "wte.weight", False), ("wpe.weight", "wpe.weight", False),
                ("ln_f.weight", "ln_f.weight", False), ("ln_f.bias", "ln_f.bias", False))
    for i in range(n_layer):
        for ours, theirs, matrix in (("ln_1", "ln_1", False), ("c_attn", "attn.c_attn", True), ("ln_2", "ln_2", False),
                                     ("attn_proj", "attn.c_proj", True), ("c_fc", "mlp.c_fc", True),
                                     ("mlp_proj", "mlp.c_proj", True)):
            yield f"blocks.{i}.{ours}.weight", f"h.{i}.{theirs}.weight", matrix
            yield f"blocks.{i}.{ours}.bias", f"h.{i}.{theirs}.bias", False


def swap(t, a, b):
    """(a * b * D, ...) rows, a groups of b -> b groups of a. By swap(t, 3, n_head) queries, keys and values go head by
    head; swap(t, n_head, 3) is the way back."""
    return t.view(a, b, -1, *t.shape[1:]).transpose(0, 1).reshape(t.shape)         # (a, b, D, ...) -> (b, a, D, ...)


def read_config(folder):
    """The flags that the folder's model stands for, and "vocab_size". ValueError for a model that is not GPT-2."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as e:
        raise ValueError(f"--init_from={folder} needs a folder with config.json and model.safetensors "
                         f"({type(e).__name__})") from None
    for key, value in NEEDED.items():
        if config.get(key, value) != value and not (key == "n_inner" and config[key] == 4 * config["n_embd"]):
            raise ValueError(f"--init_from={folder}: {key} is {config[key]!r}; only GPT-2 with {value!r} is read")
    missing = [key for key in (*SIZES.values(), "vocab_size") if key not in config]
    if missing:
        raise ValueError(f"--init_from={folder}: its config.json lacks {', '.join(missing)}")
    return {ours: config[theirs] for ours, theirs in SIZES.items()} | {
        "bias": True, "gelu": "tanh", "pos": "learned", "vocab_size": config["vocab_size"]}


def files(folder):
    """Tensor name -> the safetensors file that holds it; big models have several."""
    from safetensors import safe_open
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ValueError(f"--init_from={folder} holds no *.safetensors; pickled weights are not read: write them anew "
                         "with transformers' save_pretrained()")
    where = {}
    for path in paths:
        with safe_open(path, "pt") as f:
            where |= {name.removeprefix("transformer."): (path, name) for name in f.keys()}
    return where


@torch.no_grad()
def load(folder, model):
    """Fill a GPT of the folder's shape, or with a shorter context, in place."""
    from safetensors import safe_open
    where, params, n_head = files(folder), dict(model.named_parameters()), model.blocks[0].n_head
    for ours, theirs, matrix in names(len(model.blocks)):
        if theirs not in where:
            raise ValueError(f"--init_from={folder} lacks {theirs}")
        path, name = where[theirs]
        with safe_open(path, "pt") as f:
            t = f.get_tensor(name)
        t = t.T if matrix else t
        t = swap(t.contiguous(), 3, n_head) if ".c_attn." in ours else t
        p = params[ours]
        if ours == "wpe.weight":
            t = t[:len(p)]
        if t.shape != p.shape:
            raise ValueError(f"--init_from={folder}: {theirs} has the shape {tuple(t.shape)}, not {tuple(p.shape)}"
                             + "; encode the text with its vocabulary: python data_analyze.py --tokenizer=gpt2 ..."
                             * (ours == "wte.weight"))
        p.copy_(t)


def save(model, config, folder):
    """Write a GPT with biases and tanh-GELU as transformers' GPT2LMHeadModel. config: of train.py, a dict."""
    from safetensors.torch import save as to_bytes
    if config.get("n_expert") or not config["bias"] or config["gelu"] != "tanh" or config["pos"] != "learned":
        raise ValueError("--export=hf: only a model with --bias --gelu=tanh --pos=learned and no experts is GPT-2; "
                         f"this one has bias {config['bias']}, gelu {config['gelu']}, pos {config['pos']}; "
                         "--export=model.pt takes any")
    params, tensors = dict(model.named_parameters()), {}
    for ours, theirs, matrix in names(config["n_layer"]):
        t = params[ours].detach()
        t = swap(t, config["n_head"], 3) if ".c_attn." in ours else t
        tensors[f"transformer.{theirs}"] = (t.T if matrix else t).contiguous()
    about = {k: v for k, v in NEEDED.items() if v is not None} | {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": len(params["wte.weight"]), "torch_dtype": "float32",
        **{theirs: config[ours] for ours, theirs in SIZES.items()}, "n_ctx": config["block_size"]}
    os.makedirs(folder, exist_ok=True)
    write_atomic(Path(folder) / "config.json", lambda f: f.write(json.dumps(about, indent=1).encode()))
    write_atomic(Path(folder) / "model.safetensors", lambda f: f.write(to_bytes(tensors, {"format": "pt"})))
