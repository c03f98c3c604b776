"""What a family learns from, and how it is judged. The loop asks for batches and scores, and knows no family.

    Causal      GPT: the next token, over windows or documents
    Masked      BERT: masked tokens, 80 % as [MASK], 10 % as another, 10 % as they are; nsp: does B follow A?
    Labelled    BERT, fine-tuned: a class or a number for each text, or pair of texts
    Pictures    ViT: a class for each image, shifted and flipped

A task has `store` (the training samples, as plan.py sees them), model(**shape), batch(ids, length, step, first, mode)
-> x, y, targets(ids, length, tokens) -> what the summed loss of a step is divided by, and for the evaluation
open_val(), n_val, val_batch(), score() and metrics(). All that is random follows from (seed, step, place in the global
batch), so that a resume needs no state and ranks need no talk. BERT: arXiv 1810.04805 section 3.1.
"""
import copy
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import curriculum
import ltd
from data import Store, read_labels
from images import ImageStore, is_images
from model import BERT, GPT, ViT

MASKED, KIND, OTHER, PAIR, SHIFT = -1, -2, -3, -4, -5      # ltd.keys()' numbers of our draws


class Causal:
    cls, least = GPT, 1         # least: tokens of the shortest row that can be learnt from

    def __init__(self, data, block_size, samples, **_):
        self.store, self.T = Store(data, "train", block_size, samples), block_size
        self.data, self.ends = data, {"vocab_size": self.store.meta["vocab_size"]}

    def open_val(self):
        self.val = Store(self.data, "val", self.T)              # windows, whatever the training samples are
        self.n_val = self.val.n_samples

    def model(self, **shape):
        return self.cls(block_size=self.T, **self.ends, **shape)

    def batch(self, ids, length, step, first, mode):
        cut = curriculum.reshape if mode == "reshape" else curriculum.truncate
        pair = cut(self.store.rows(ids), length)                                # (b, T+1) -> (b*pieces, L) twice
        return [torch.from_numpy(np.ascontiguousarray(a)) for a in pair]

    def targets(self, ids, length, tokens):
        return tokens

    def val_batch(self, ids):
        rows = torch.from_numpy(self.val.rows(ids))
        return rows[:, :-1], rows[:, 1:]

    def score(self, engine, x, y, place, n_eval):
        """The sums that metrics() is made of, over these samples: float64. Those of all batches and ranks are added."""
        return engine.loss(x, y).double()[None]

    def metrics(self, sums, ids):
        return {"val_loss": sums[0].item() / (len(ids) * self.T)}


class Masked(Causal):
    """Rows are [CLS] and a window's tokens; of documents [CLS] A [SEP], or [CLS] A [SEP] B [SEP] with nsp, where B is
    the rest of the document or, every second time, the beginning of another one at least as long. Special tokens are
    the vocabulary's own where it has them (WordPiece); else [SEP] is the end of a document and two ids are added."""
    cls = BERT

    def __init__(self, data, block_size, samples, seed=0, nsp=False, mask_prob=0.15, **_):
        self.data, self.T, self.samples, self.seed = data, block_size, samples, seed
        self.nsp, self.prob = nsp, mask_prob
        if nsp and samples != "document":
            raise ValueError("--nsp makes pairs of sentences out of documents: give --samples=document")
        self.real = Store(data, "train", block_size, samples)
        meta = self.real.meta
        V = meta["vocab_size"]
        special = meta.get("special") or {"sep": meta["eot_id"], "mask": V, "cls": V + 1}
        self.cls_id, self.sep_id, self.mask_id = (special[k] for k in ("cls", "sep", "mask"))
        self.plain = np.setdiff1d(np.arange(V), list(special.values()))     # what a masked token may be replaced by
        self.ends = {"vocab_size": max(V, *(i + 1 for i in special.values())), "nsp": nsp,
                     "padded": samples == "document"}
        # [CLS], and in documents each [SEP], is never masked
        self.added = {"window": 1, "document": 2}[samples] + nsp
        self.store, self.least = self.lengthened(self.real), self.added + 1

    def lengthened(self, store):
        """The store as the plan sees it: its rows are as long as ours."""
        if store.lengths is None:
            return store
        store = copy.copy(store)
        store.lengths = np.minimum(store.lengths + self.added, self.T)
        return store

    def open_val(self):
        self.val = Store(self.data, "val", self.T, self.samples)
        self.val_lengths, self.n_val = self.lengthened(self.val).lengths, self.val.n_samples

    def val_length(self, ids):
        """The longest of these, rounded up to a multiple of 8, as plan.py has it for training."""
        return self.T if self.val_lengths is None else min(-(-int(self.val_lengths[ids].max()) // 8) * 8, self.T)

    def rows(self, store, lengths, ids, length, key, places):
        """(b, L) ids with -1 for padding, (b, L) segments, (b, L) whether it may be masked, (b,) whether B is alien."""
        tokens = store.rows(ids)                                                        # (b, T+1)
        b, alien = len(ids), np.zeros(len(ids), np.int64)
        x, segments = np.full((b, length), -1, np.int64), np.zeros((b, length), np.int64)
        x[:, 0] = self.cls_id
        if lengths is None:
            x[:, 1:] = tokens[:, :length - 1]
            return x, segments, np.arange(length) > np.zeros((b, 1)), alien
        n = np.minimum(lengths[ids], length)
        if self.nsp:
            draw = ltd.keys(*key, places, torch.tensor([PAIR]), 10).numpy()[:, 0]
            for row, segment, text, end, word, i in zip(x, segments, tokens, n, draw, range(b)):
                m = end - 3                                     # tokens of A and B
                split = 1 + int(word[0] % max(1, m - 1))
                second = text[split:m]
                if word[1] & 1 and len(second):
                    others = word[2:] % store.n_samples         # one that is long enough, else B stays
                    fits = [j for j in others if store.lengths[j] >= len(second) and j != ids[i]]
                    if fits:
                        second, alien[i] = store.rows(fits[:1])[0, :len(second)], 1
                row[1:end] = [*text[:split], self.sep_id, *second, self.sep_id]
                segment[split + 2:end] = 1
        else:
            inside = np.arange(1, length) < n[:, None]
            x[:, 1:][inside] = tokens[:, :length - 1][inside]
            x[np.arange(b), n - 1] = self.sep_id                # a cut document ends with it, too
        return x, segments, (x >= 0) & (x != self.cls_id) & (x != self.sep_id), alien

    def counts(self, lengths, n_rows, length):
        """How many tokens of each row are masked: known from lengths alone, so that every rank knows it of all rows."""
        n = np.full(n_rows, length) if lengths is None else np.minimum(lengths, length)
        return np.maximum(1, np.floor(self.prob * np.maximum(n - self.added, 1) + 0.5)).astype(np.int64)

    def masked(self, store, lengths, ids, length, key, places):
        """Samples with their masks, x (b, L, 2) and y (b, L). key: (seed, step), and places: (b,) int64, are what the
        draw is keyed on."""
        x, segments, may, alien = self.rows(store, lengths, ids, length, key, places)
        draw = ltd.keys(*key, places, torch.tensor([MASKED, KIND, OTHER]), length).numpy()
        first, kind, other = draw.transpose(1, 0, 2)                                      # (b, L) three times
        count = self.counts(None if lengths is None else lengths[ids], len(ids), length)
        rank = np.where(may, first, np.iinfo(np.int64).max).argsort(1).argsort(1)         # (b, L)
        chosen = may & (rank < count[:, None])
        y, tenth = np.where(chosen, x, -1), kind % 10
        x = np.where(chosen & (tenth < 8), self.mask_id, x)
        x = np.where(chosen & (tenth == 8), self.plain[other % len(self.plain)], x)
        if self.nsp:
            y[:, 0] = alien
        return torch.from_numpy(np.stack((x, segments), 2)), torch.from_numpy(y)        # (b, L, 2), (b, L)

    def batch(self, ids, length, step, first, mode):
        return self.masked(self.real, self.store.lengths, ids, length, (self.seed, step),
                           torch.arange(first, first + len(ids)))

    def targets(self, ids, length, tokens):
        return int(self.counts(None if self.store.lengths is None else self.store.lengths[ids], len(ids), length).sum())

    def val_batch(self, ids):
        """A sample's mask is the same in every run: its number takes the place of the row's, and no seed has a say."""
        return self.masked(self.val, self.val_lengths, ids, self.val_length(ids), (0, -1), torch.from_numpy(ids))

    def metrics(self, sums, ids):
        lengths = None if self.val_lengths is None else self.val_lengths[ids]
        return {"val_loss": sums[0].item() / int(self.counts(lengths, len(ids), self.T).sum())}


class Scores:
    """How classes and numbers are judged, from sums over samples: the mean loss, and GLUE's metrics."""

    def score(self, engine, x, y, place, n_eval):
        out = engine.net(x).double()                                            # (b, n_labels)
        if self.is_number:          # Spearman's ranks need all predictions: each goes to its place
            sums = torch.zeros(1 + 2 * n_eval, dtype=torch.float64, device=out.device)
            at = torch.arange(1 + place, 1 + place + len(out), device=out.device)
            sums[0], sums[at], sums[at + n_eval] = (out[:, 0] - y).square().sum(), out[:, 0], y.double()
            return sums
        mine, true = out.argmax(1), y
        return torch.stack([F.cross_entropy(out, y, reduction="sum"), *(
            s.sum().double() for s in (mine == true, (mine == 1) & (true == 1), (mine == 1) & (true != 1),
                                       (mine != 1) & (true == 1), (mine != 1) & (true != 1)))])

    def metrics(self, sums, ids):
        sums, n = sums.cpu().numpy(), len(ids)
        found = {"val_loss": sums[0] / n}
        if self.is_number:
            mine, true = sums[1:1 + n], sums[1 + n:]
            every = {"pearson": lambda: pearson(mine, true), "spearman": lambda: pearson(ranks(mine), ranks(true))}
        else:
            right, tp, fp, fn, tn = sums[1:]
            every = {"accuracy": lambda: right / n, "f1": lambda: 2 * tp / max(1, 2 * tp + fp + fn),
                     "matthews": lambda: (tp * tn - fp * fn) / max(1.0, math.sqrt((tp + fp) * (tp + fn) * (tn + fp)
                                                                                  * (tn + fn)))}
        return {k: float(v) for k, v in (found | {name: every[name]() for name in self.judged_by}).items()}


def pearson(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / max(1e-12, math.sqrt((a * a).sum() * (b * b).sum()))


def ranks(values):
    """Places in the order, equal values at their mean place: (n,) float64."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[inverse]


class Labelled(Scores, Masked):
    """Rows are [CLS] A [SEP] or [CLS] A [SEP] B [SEP], as data_analyze.py --task stored them. Where they do not fit,
    the longer text is cut first."""

    def __init__(self, data, block_size, samples, seed=0, **_):
        super().__init__(data, block_size, "document", seed)
        meta = self.real.meta
        self.judged_by, self.is_number, n_labels = meta["metrics"], not meta["classes"], meta["n_labels"]
        self.labels = {s: read_labels(data, s, n, n_labels) for s, n in meta["documents"].items()}
        self.starts = {s: np.append(np.load(f"{data}/{s}.docs.npy"), n) for s, n in meta["tokens"].items()}
        self.ends, self.least = {"vocab_size": self.ends["vocab_size"], "n_labels": n_labels}, 5

    def examples(self, split, store, ids, length):
        """(b, L, 2) tokens and segments, (b,) labels."""
        x, segments = np.full((len(ids), length), -1, np.int64), np.zeros((len(ids), length), np.int64)
        x[:, 0] = self.cls_id
        ids = ids if store.kept is None else store.kept[ids]
        for row, segment, start, end in zip(x, segments, self.starts[split][ids], self.starts[split][ids + 1]):
            text = store.tokens[0][start:end]                   # A [SEP], or A [SEP] B [SEP]
            a = 1 + int((text == self.sep_id).argmax())
            keep = cut_pair(a, len(text) - a, length - 1)
            text = np.concatenate((text[:keep[0]], text[a:a + keep[1]]))
            text[np.cumsum([n for n in keep if n]) - 1] = self.sep_id
            row[1:1 + len(text)], segment[1 + keep[0]:1 + len(text)] = text, 1
        labels = torch.from_numpy(self.labels[split][ids])
        return torch.from_numpy(np.stack((x, segments), 2)), labels.float() if self.is_number else labels.long()

    def batch(self, ids, length, step, first, mode):
        return self.examples("train", self.real, ids, length)

    def targets(self, ids, length, tokens):
        return len(ids)

    def val_batch(self, ids):
        return self.examples("val", self.val, ids, self.val_length(ids))


def cut_pair(a, b, room):
    """How many of the a and b tokens of two texts to keep, so that they fit: the longer one gives first."""
    over = max(0, a + b - room)
    a, over = a - min(over, max(0, a - b)), over - min(over, max(0, a - b))
    b, over = b - min(over, max(0, b - a)), over - min(over, max(0, b - a))
    return a - over // 2, b - (over + 1) // 2


class Pictures(Scores):
    cls, judged_by, is_number, least = ViT, ("accuracy",), False, 1

    def __init__(self, data, image_size, patch_size, seed=0, augment="none", **_):
        self.store, self.data, self.seed, self.how = ImageStore(data, "train"), data, seed, augment
        channels = self.store.meta["shape"][0]
        self.ends = {"n_labels": len(self.store.meta["classes"]), "image_size": image_size, "patch_size": patch_size,
                     "channels": channels}

    def model(self, **shape):
        return ViT(**self.ends, **shape)

    def open_val(self):
        self.val = ImageStore(self.data, "val")
        self.n_val = self.val.n_samples

    def batch(self, ids, length, step, first, mode):
        images, labels = self.store.rows(ids)
        images = torch.from_numpy(images)
        if self.how != "none":
            images = augment(images, self.seed, step, torch.arange(first, first + len(ids)), self.how)
        return images, torch.from_numpy(labels)

    def targets(self, ids, length, tokens):
        return len(ids)

    def val_batch(self, ids):
        return tuple(map(torch.from_numpy, self.val.rows(ids)))


def augment(images, seed, step, rows, how="crop,flip"):
    """Shift each image by up to an eighth of its size, zeros coming in (crop), and mirror every second one (flip).
    images: (B, c, H, W); rows: (B,) int64, places in the global batch. Returns the same shape and dtype."""
    B, c, H, W = images.shape
    pad = H // 8 if "crop" in how else 0
    y, x, mirror = ltd.keys(seed, step, rows, torch.tensor([SHIFT]), 3)[:, 0].unbind(1)         # (B,) three times
    y, x = (start[:, None] % (2 * pad + 1) + torch.arange(size) for start, size in ((y, H), (x, W)))    # (B, H), (B, W)
    if "flip" in how:
        x = torch.where((mirror % 2 == 0)[:, None], x, x.flip(1))
    batch, channel = torch.arange(B)[:, None, None, None], torch.arange(c)[:, None, None]
    return F.pad(images, (pad,) * 4)[batch, channel, y[:, None, :, None], x[:, None, None, :]]


FLAGS = ("arch", "data", "block_size", "samples", "seed", "nsp", "mask_prob", "image_size", "patch_size", "augment")


def is_labelled(folder):
    """Whether the store holds labelled texts, made by data_analyze.py --task."""
    return (Path(folder) / "train.labels.npy").is_file() and not is_images(folder)


def make_task(arch, data, block_size, samples, **options):
    """The task that the family and the store make. Takes the flags in FLAGS."""
    if (arch == "vit") != is_images(data):
        raise ValueError(f"--data={data} holds {'images' if arch != 'vit' else 'no images'}, and --arch={arch} learns "
                         f"from {'text' if arch != 'vit' else 'images'}: give another --data, or --model")
    if arch == "vit":
        return Pictures(data, **options)
    labelled = is_labelled(data)
    if arch == "gpt" and labelled:
        raise ValueError(f"--data={data} holds labelled texts: give --model=bert-base, --arch=bert or an --init_from "
                         "that is a BERT")
    return {"gpt": Causal, "bert": Labelled if labelled else Masked}[arch](data, block_size, samples, **options)
