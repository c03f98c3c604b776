"""Image stores: labelled images of one size, read through a memory map; and how they are made.

    python data_analyze.py --images=shapes --out=data/shapes                    drawn by the program
    python data_analyze.py --images=cifar-10-batches-py --out=data/cifar10      CIFAR-10 or CIFAR-100's python batches
    python data_analyze.py --images=photos --image_size=224 --out=data/photos   a folder for each class (needs Pillow)
    python data_analyze.py --images=digits.npz --out=data/digits                x_train, y_train, x_test, y_test

A store is meta.json, {train,val}.images.bin (N, channels, height, width) uint8 and {train,val}.labels.npy (N,) int64;
difficulties lie in images/, one number an image: --metric=loss, or a function of yours (images, labels) -> (N,).
"""
import hashlib
import json
import os
import pickle
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data import Store, goes_to_val, new_folder, read_json, read_labels, refuse_out

SHAPES = ("disc", "ring", "square", "frame", "triangle", "cross", "bar", "star", "clover", "pair")
FORMATS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff")
CHUNK = 1024        # images handled at a time


def is_images(folder):
    """Whether the folder is a store of images."""
    file = Path(folder) / "meta.json"
    return file.is_file() and "shape" in read_json(file, ())


class ImageStore(Store):
    """The images of one split. rows(ids) -> (B, c, H, W) uint8 and (B,) int64 labels. block_size is how many numbers an
    image has; what a model makes of them is its own affair."""

    def __init__(self, folder, split):
        self.folder, self.split, self.samples, self.lengths = Path(folder), split, "image", None
        self.meta = read_json(self.folder / "meta.json", ("shape", "classes", "counts", "fingerprint"))
        self.n_samples = self.meta["counts"].get(split, 0)
        file, shape = self.folder / f"{split}.images.bin", (self.n_samples, *self.meta["shape"])
        size = file.stat().st_size if file.is_file() else -1
        if size != np.prod(shape) or not self.n_samples:
            raise ValueError(f"{file} has {max(size, 0)} bytes, {np.prod(shape)} are promised, and no split may be "
                             "empty; make the data again")
        self.images = np.memmap(file, np.uint8, "r", shape=shape)
        self.labels = read_labels(self.folder, split, self.n_samples, len(self.meta["classes"]))
        self.block_size, self.columns = int(np.prod(shape[1:])), self.folder / "images"

    def rows(self, ids):
        return self.images[ids], self.labels[ids]

    def inputs(self, first, last):
        return self.images[first:last], self.labels[first:last]

    def analysis(self, metric, name):
        return f"python data_analyze.py --data={self.folder} --metric={name}"


def open_store(folder, block_size, samples):
    """The training split of a store of any kind."""
    return ImageStore(folder, "train") if is_images(folder) else Store(folder, "train", block_size, samples)


# -----------------------------------------------------------------------------
# sources: each gives {split: (images, labels)} and the names of the classes; images are (N, c, H, W) uint8, or a list
# of files


def drawn(n_train=8000, n_val=2000, size=32, seed=0):
    """Ten kinds of bright shapes of various places, sizes, angles and colours on dark and noisy ground, (N, 3, size,
    size). The same on every machine up to the last bit of sin and cos."""
    r, n = np.random.default_rng(seed), n_train + n_val
    labels = r.integers(0, len(SHAPES), n)
    angle, scale, place = r.uniform(-.5, .5, n), r.uniform(.6, .9, n), r.uniform(-.2, .2, (2, n))
    front, back, slope = r.uniform(130, 255, (n, 3)), r.uniform(0, 110, (n, 3)), r.uniform(0, 110, (n, 3))
    grid, images = np.linspace(-1, 1, size), np.empty((n, 3, size, size), np.uint8)
    for i in range(0, n, CHUNK):
        s = slice(i, i + CHUNK)
        c, v = np.cos(angle[s])[:, None, None], np.sin(angle[s])[:, None, None]
        dx, dy = (g - p[s, None, None] for g, p in zip((grid[None, None], grid[None, :, None]), place))
        x, y = (dx * c + dy * v) / scale[s, None, None], (dy * c - dx * v) / scale[s, None, None]    # (k, H, W)
        far, turn = np.hypot(x, y), np.arctan2(y, x)
        inside = np.select(
            [labels[s, None, None] == k for k in range(len(SHAPES))],
            [far < .8, (far < .9) & (far > .5), np.maximum(abs(x), abs(y)) < .7,
             (np.maximum(abs(x), abs(y)) < .8) & (np.maximum(abs(x), abs(y)) > .45),
             (y > -.5) & (abs(x) * 1.7 + y < .9),
             (np.minimum(abs(x), abs(y)) < .25) & (np.maximum(abs(x), abs(y)) < .9),
             (abs(y) < .25) & (abs(x) < .95), far < .6 + .35 * np.cos(5 * turn), far < .45 + .45 * np.cos(3 * turn),
             np.hypot(abs(x) - .55, y) < .4])
        ground = back[s, :, None, None] * .7 + slope[s, :, None, None] * .3 * (grid[None, None, :, None] + 1) / 2
        picture = np.where(inside[:, None], front[s, :, None, None], ground) + r.normal(0, 20, (len(x), 3, size, size))
        images[s] = picture.clip(0, 255)
    return {"train": (images[:n_train], labels[:n_train]), "val": (images[n_train:], labels[n_train:])}, list(SHAPES)


class _Plain(pickle.Unpickler):
    """A pickle may call anything; this one makes arrays of numbers and nothing else."""

    def find_class(self, module, name):
        allowed = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
                   ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a batch of images")
        return super().find_class(module, name)


def cifar(folder):
    """CIFAR-10 (data_batch_1 to 5, test_batch) or CIFAR-100 (train, test), as their makers pack them for Python."""
    def read(name, *keys):
        try:
            with open(folder / name, "rb") as f:
                content = _Plain(f, encoding="bytes").load()
            return [content[key] for key in keys]
        except (OSError, EOFError, pickle.UnpicklingError, ValueError, KeyError, TypeError, IndexError) as e:
            raise ValueError(f"{folder / name} is no batch of CIFAR ({e}); fetch it again") from None
    hundred = (folder / "train").is_file()
    train = ["train"] if hundred else [f"data_batch_{i}" for i in range(1, 6)]
    key, found = b"fine_labels" if hundred else b"labels", {}
    for split, names in (("train", train), ("val", ["test" if hundred else "test_batch"])):
        x, y = zip(*(read(name, b"data", key) for name in names))
        found[split] = np.concatenate(x).reshape(-1, 3, 32, 32), np.concatenate(y)
    names, = read("meta" if hundred else "batches.meta", b"fine_label_names" if hundred else b"label_names")
    return found, [name.decode() for name in names]


def arrays(file, val_fraction):
    """An .npz: x_train, y_train and x_test, y_test (or images, labels), (N, H, W), (N, H, W, c) or (N, c, H, W)."""
    try:
        with np.load(file, allow_pickle=False) as f:
            z = {name: f[name] for name in ("images", "labels", "x_train", "y_train", "x_test", "y_test") if name in f}
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as e:
        raise ValueError(f"--images={file} is no .npz of numbers ({e})") from None
    pair = next((p for p in (("x_train", "y_train"), ("images", "labels")) if p[0] in z and p[1] in z), None)
    if pair is None:
        raise ValueError(f"--images={file} needs arrays x_train and y_train (and x_test, y_test), or images and labels")
    sets = [(z[pair[0]], z[pair[1]])] + ([(z["x_test"], z["y_test"])] if "x_test" in z and "y_test" in z else [])
    sets = [(_channels_first(x, file), y.reshape(-1)) for x, y in sets]
    if any(len(x) != len(y) or not len(y) for x, y in sets):
        raise ValueError(f"--images={file}: as many labels as images are needed, and some of each")
    if not all(np.issubdtype(y.dtype, np.integer) for _, y in sets):
        raise ValueError(f"--images={file}: labels must be integers from 0 on")
    n = 1 + max(int(y.max()) for _, y in sets)
    if min(int(y.min()) for _, y in sets) < 0:
        raise ValueError(f"--images={file}: labels must be integers from 0 on")
    found = dict(zip(("train", "val"), sets)) if len(sets) == 2 else _split(*sets[0], val_fraction)
    return found, [str(i) for i in range(n)]


def _channels_first(x, file):
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise ValueError(f"--images={file}: images are {x.dtype} of shape {x.shape}; they must be uint8, (N, H, W), "
                         "(N, H, W, c) or (N, c, H, W)")
    if x.ndim == 3:
        return x[:, None]                                       # (N, H, W) -> (N, 1, H, W)
    return x.transpose(0, 3, 1, 2) if x.shape[3] in (1, 3) else x       # (N, H, W, c) -> (N, c, H, W)


def _split(x, y, val_fraction):
    val = goes_to_val(np.arange(len(y)), val_fraction)
    pick = (lambda s, m: [s[j] for j in np.flatnonzero(m)]) if isinstance(x, list) else (lambda s, m: s[m])
    return {"train": (pick(x, ~val), y[~val]), "val": (pick(x, val), y[val])}


def folders(root, val_fraction):
    """Folders of one class each, in the order of their names; root may hold train/ and val/ (or test/) with those."""
    def below(folder, classes):
        files = [(p, k) for k, c in enumerate(classes) for p in sorted((folder / c).rglob("*"))
                 if p.suffix.lower() in FORMATS]
        return [p for p, _ in files], np.array([k for _, k in files], np.int64)
    top = root / "train" if (root / "train").is_dir() else root
    val = next((root / name for name in ("val", "test") if (root / name).is_dir() and top != root), None)
    classes = sorted(p.name for p in top.iterdir() if p.is_dir() and not p.name.startswith((".", "__"))
                     and any(f.suffix.lower() in FORMATS for f in p.rglob("*")))
    x, y = below(top, classes)
    if not x:
        raise ValueError(f"--images={root} holds no images in folders of one class each; it needs "
                         f"{root}/CLASS/NAME.png (of {', '.join(FORMATS)}), CIFAR's batches, an .npz file, or shapes")
    # sorted by class, every k-th file is spread over the classes
    return ({"train": (x, y), "val": below(val, classes)} if val else _split(x, y, val_fraction)), classes


def opened(paths, size, pool):
    """Image files -> (n, 3, size, size) uint8: the shorter side is scaled to size, the middle is cut out."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError("--images of image files need the package pillow: pip install pillow") from None
    out = np.empty((len(paths), 3, size, size), np.uint8)

    def fill(row, path):
        try:
            with Image.open(path) as image:
                row[:] = np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC)
                                    ).transpose(2, 0, 1)
        except (OSError, ValueError, Image.DecompressionBombError) as e:
            raise ValueError(f"{path} is no image that opens ({e}); mend it, or take it away") from None
    list(pool.map(fill, out, paths))
    return out


# -----------------------------------------------------------------------------


def build(source, out, image_size, val_fraction, overwrite=False, workers=0):
    """Write the store `out`: into a folder beside it first, renamed when it is whole."""
    out, path = Path(out), Path(source)
    sources = [path] if source != "shapes" else []
    refuse_out(out, overwrite, r"meta\.json|(train|val)\.(images\.bin|labels\.npy)|images", sources)
    if source == "shapes":
        splits, classes = drawn(size=image_size or 32)
    elif path.suffix == ".npz" and path.is_file():
        splits, classes = arrays(path, val_fraction)
    elif not path.is_dir():
        raise ValueError(f"--images={source} does not exist; give a folder, an .npz file, or shapes")
    elif (path / "data_batch_1").is_file() or (path / "train").is_file() and (path / "meta").is_file():
        splits, classes = cifar(path)
    else:
        splits, classes = folders(path, val_fraction)
    if len(classes) < 2:
        raise ValueError(f"--images={source} holds images of {', '.join(classes) or 'no class'} only; two classes are "
                         "needed")
    if not all(len(y) for _, y in splits.values()):
        raise ValueError(f"--images={source} leaves a split empty; give more images or a larger --val_fraction")
    if image_size and source != "shapes" and not isinstance(splits["train"][0], list):
        raise ValueError(f"--image_size={image_size} scales image files; those of --images={source} have a size, and "
                         "train.py --image_size scales them on the way")
    with new_folder(out) as tmp:
        digest, shape = hashlib.blake2b(digest_size=6), None
        for split, (x, y) in splits.items():
            with ThreadPoolExecutor(workers or os.cpu_count()) as pool, open(tmp / f"{split}.images.bin", "wb") as f:
                for i in range(0, len(y), CHUNK):
                    part = x[i:i + CHUNK]
                    files = isinstance(part, list)
                    part = opened(part, image_size or 224, pool) if files else np.ascontiguousarray(part)
                    shape = shape or part.shape[1:]
                    if shape[1] != shape[2]:
                        raise ValueError(f"--images={source}: images are {shape[1]} by {shape[2]}; "
                                         "they must be square")
                    if part.shape[1:] != shape:
                        raise ValueError(f"--images={source}: images of {shape} and {part.shape[1:]}; "
                                         "one size is needed")
                    f.write(part.tobytes())
                    digest.update(part.tobytes())
            y = np.asarray(y, np.int64)
            np.save(tmp / f"{split}.labels.npy", y)
            digest.update(y.tobytes())
        counts = {split: len(y) for split, (_, y) in splits.items()}
        meta = {"shape": [int(n) for n in shape], "classes": classes, "counts": counts,
                "fingerprint": digest.hexdigest()}
        (tmp / "meta.json").write_text(json.dumps(meta, indent=1))
    print(f"{out}: {counts['train']:,} images of {len(classes)} classes, {shape[0]} x {shape[1]} x {shape[2]}, and "
          f"{counts['val']:,} for validation; fingerprint {meta['fingerprint']}", flush=True)
