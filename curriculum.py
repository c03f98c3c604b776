"""Curriculum learning: which samples a step may draw, in which order, and how long their rows are.

The idea: an offline analysis gives every sample one number a metric (its difficulty). A *pace* says how far
up that scale a step may go, so that each sample has one admission step; sorted by it, every pool is a prefix
of one array. The sampler draws from that prefix without replacement, as a function of (seed, step) alone.

Paper: "DeepSpeed Data Efficiency", arXiv 2212.03597, section 3.1; length warm-up: arXiv 2108.06084.
Numpy only, and nothing else of this project: the file can be pasted into another repository.
Try it:  python train.py --plan
"""
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# -----------------------------------------------------------------------------
# pacing: how a limit grows with the optimizer step

GRAMMAR = """START..END:DURATION[:SHAPE]
    START, END   numbers, or both with % (of the metric's samples; of block_size for --seqlen and --ltd)
    DURATION     optimizer steps, or % of the steps that a plain run of the same budget would take
    SHAPE        linear (default), sqrt, root3, root4, ..., constant (START until DURATION, then END), FILE.py:FUNCTION,
                 or levels, each with its last step, as 16@99,32@499 (END from then on)\
"""


def pace(step, start, end, duration, root=1, multiple=1):
    """The limit d(t) at optimizer step(s) `step` (counted from 0); semantics of 2212.03597 section 3.1.

    d(t) = floor(start + (end - start) * min(t / duration, 1) ** (1 / root)), rounded down to `multiple`, but never
    below ceil(start / multiple) * multiple and never above `end`; `end` itself is reached exactly at t = duration.
    step: int or int array; returns int64 of the same shape. multiple=None: no rounding at all, returns float64.
    Raises ValueError for start < 0, start > end, duration < 0, root <= 0, multiple < 1.
    """
    if not 0 <= start <= end:
        raise ValueError(f"a pace needs 0 <= start <= end, not {start}..{end}")
    if duration < 0 or root <= 0 or (multiple is not None and multiple < 1):
        raise ValueError(f"a pace needs duration >= 0, root > 0, multiple >= 1, not {duration}, {root}, {multiple}")
    t = np.asarray(step, dtype=np.float64)
    progress = np.clip(t / duration, 0, 1) if duration else np.ones_like(t)
    return snap(start + (end - start) * progress ** (1 / root), t >= duration, start, end, multiple)


def snap(d, done, start, end, multiple):
    """Round raw limits d down to the multiple, keep them inside the bounds, put `end` where done."""
    if multiple is not None:
        # 1e-9: sqrt(0.04) * 120 may come out as 23.999999999999996, and floor must not see that
        d = np.floor((np.floor(d + 1e-9)) / multiple) * multiple
        d = np.maximum(d, np.ceil(start / multiple) * multiple)
        end = np.floor(end)
    d = np.where(done, end, np.minimum(d, end))
    return d if multiple is None else d.astype(np.int64)


@dataclass(frozen=True)
class Pace:
    """One schedule as the user wrote it. `name` is what stood before the pace: a metric or a mode."""
    name: str
    start: float
    end: float
    percent: bool           # start and end are percentages
    duration: float
    relative: bool          # duration is a percentage of the plain run's steps
    shape: str
    text: str

    @classmethod
    def parse(cls, text, flag="--pool", example="voc:1%..100%:40%:sqrt", named=True):
        """Read `[NAME:]START..END:DURATION[:SHAPE]`. Raises ValueError with the grammar and a working example."""
        number = r"(\d+(?:\.\d+)?)(%?)"
        m = re.fullmatch(rf"(?:(.+?):)?{number}\.\.{number}:{number}(?::(.+))?", text.strip())
        refuse = (f"{flag}={text} is not understood; it takes {'NAME:' if named else ''}{GRAMMAR}\n"
                  f"    example      {flag}={example}")
        if not m or bool(m[1]) != named or m[3] != m[5]:
            raise ValueError(refuse)
        shape, level = m[8] or "linear", r"\d+(?:\.\d+)?@\d+"
        if not re.fullmatch(rf"linear|sqrt|root[1-9]\d*|constant|{level}(,{level})*|.+\.py:\w+", shape):
            raise ValueError(refuse)
        p = cls(m[1] or "", float(m[2]), float(m[4]), m[3] == "%", float(m[6]), m[7] == "%", shape, text.strip())
        if p.start > p.end:
            raise ValueError(f"{flag}={text}: START {p.start:g} is above END {p.end:g}; a pace only grows. "
                             f"Example: {flag}={example}")
        if "@" in shape and ".py:" not in shape:
            levels, last = zip(*(map(float, pair.split("@")) for pair in shape.split(",")))
            if list(levels) != sorted(levels) or list(last) != sorted(set(last)):
                raise ValueError(f"{flag}={text}: levels and their last steps must rise, as in 16@99,32@499")
        if p.percent and p.end > 100:
            raise ValueError(f"{flag}={text}: END {p.end:g}% is above 100%. Example: {flag}={example}")
        return p

    def steps(self, plain_steps):
        """DURATION in optimizer steps, for a plain run of plain_steps."""
        return int(round(self.duration * plain_steps / 100)) if self.relative else int(self.duration)

    def at(self, step, plain_steps, multiple=1, whole=None):
        """Limits at step(s): int64 (float64 for multiple=None). whole: what 100% stands for (the block size)."""
        start, end, duration = self.start, self.end, self.steps(plain_steps)
        if self.percent and whole:
            start, end = (max(1, round(v * whole / 100)) for v in (start, end))
        if "@" in self.shape and ".py:" not in self.shape:      # levels, each up to and with its last step; then END
            levels, last = zip(*(map(float, pair.split("@")) for pair in self.shape.split(",")))
            if self.percent and whole:
                levels = [v * whole / 100 for v in levels]
            t = np.asarray(step)
            d = np.append(levels, end)[np.searchsorted(last, t, side="left")]
            return snap(np.clip(d, start, end), t > last[-1], start, end, multiple)
        if self.shape == "constant":
            t = np.asarray(step)
            return snap(np.full(t.shape, float(start)), t >= duration, start, end, multiple)
        if self.shape.partition(".py:")[1]:
            f = load_function(self.shape)
            t = np.asarray(step)
            d = np.array([float(f(int(i))) for i in t.ravel()]).reshape(t.shape)
            if not np.isfinite(d).all():
                raise ValueError(f"{self.text}: {self.shape} gives no finite number at step "
                                 f"{t.ravel()[np.argmin(np.isfinite(d))]}")
            return snap(np.clip(d, start, end), d >= end, start, end, multiple)
        root = {"linear": 1, "sqrt": 2}.get(self.shape) or int(self.shape[4:])
        return pace(step, start, end, duration, root, multiple)

    def limit(self, step, plain_steps):
        """The difficulty limit of a pool at step(s). A bound with a fraction (0.2..0.9) means a scale finer than 1, a
        compression ratio, a loss or 0.5%, and is not rounded."""
        return self.at(step, plain_steps, 1 if self.start % 1 == self.end % 1 == 0 else None)


def load_function(spec):
    """The user's own FILE.py:FUNCTION, the only code that a flag ever loads."""
    file, _, name = spec.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"{spec}: there is no file {file}; give it as FILE.py:FUNCTION")
    module_spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{spec}: {file} has no function {name}")
    return getattr(module, name)


# -----------------------------------------------------------------------------
# admission: the first step at which a sample may be drawn

NEVER = np.iinfo(np.int32).max
CHUNK = 1 << 20         # samples in flight: a column of a hundred million is never copied whole


def ranks(values):
    """Place of each sample in the order by (value, sample id): (N,) int32, a permutation of 0..N-1. What a percentile
    is counted in. A sort, so it is made once, offline, and kept beside the column."""
    if len(values) >= NEVER:
        raise ValueError(f"{len(values):,} samples are more than 31 bits can number; take a larger block_size")
    order = np.argsort(values)          # not stable but four times as fast; a few that are equal are put right
    ordered = values[order]
    same = np.append(ordered[1:] == ordered[:-1], False)        # as the next one
    del ordered
    if same.mean() > 0.1:
        order = np.argsort(values, kind="stable")
    elif same.any():
        tied = same | np.roll(same, 1)
        run = np.cumsum(~np.roll(same, 1))[tied]
        order[tied] = order[tied][np.lexsort((order[tied], run))]
    out = np.empty(len(values), np.int32)
    out[order] = np.arange(len(values), dtype=np.int32)
    return out


def admission(columns, paces, n_steps, plain_steps):
    """First step at which each sample is admitted: (N,) int32; samples that no step admits get NEVER.

    columns: one (N,) array a pace: the metric's values for a pace by value (in when value <= d(t)), its ranks() for
    one by percentile (in when among the ceil(N * d(t) / 100) easiest, at least 1; 2212.03597 section 3.1). A sample is
    in when every metric admits it (intersection), so its step is the maximum over the metrics.
    Raises ValueError for a limit that falls, a value that is not finite, a run that would begin with an empty pool."""
    n, when = len(columns[0]), []
    for p, column in zip(paces, columns):
        limit = p.limit(np.arange(n_steps), plain_steps)
        if (np.diff(limit) < 0).any():
            falls = int(np.argmax(np.diff(limit) < 0)) + 1
            raise ValueError(f"--pool={p.text}: the limit falls at step {falls}; a pool can only grow")
        level, first = np.unique(limit, return_index=True)      # (n_levels,) and the step where each begins
        first = np.append(first, NEVER).astype(np.int32)
        table = None        # small whole numbers: a look-up, ten times as fast as a search
        if level.dtype.kind == "i" and (p.percent or column.dtype.kind in "iu") and level[-1] < CHUNK:
            table = first[np.searchsorted(level, np.arange(int(level[-1]) + 2))]
        elif p.percent:     # fractions of a percent: the size of the pool at each level, less one, is the last rank in
            level = np.maximum(1, np.ceil(n * level / 100 - 1e-9)) - 1
        when.append((level, first, table))
    out = np.zeros(n, np.int32)
    for i in range(0, n, CHUNK):
        part = out[i:i + CHUNK]
        for column, p, (level, first, table) in zip(columns, paces, when):
            chunk = column[i:i + CHUNK]
            if not np.isfinite(chunk).all():
                raise ValueError(f"--pool={p.text}: sample {i + int(np.argmin(np.isfinite(chunk)))} has no finite "
                                 f"{p.name}")
            if p.percent and table is not None:
                # rank r is in when r < N * d / 100: from d = floor(100 r / N) + 1 on; the easiest one is always in
                key = np.where(chunk == 0, 0, 100 * chunk.astype(np.int64) // n + 1)
                step = table[np.minimum(key, len(table) - 1)]
            elif table is not None:
                step = table[np.clip(chunk, 0, len(table) - 1)]
            else:
                step = first[np.searchsorted(level, chunk)]
            np.maximum(part, step, out=part)
    if out.min() > 0:
        what = "; ".join(f"{p.text} begins at {p.start:g}" + (f", the easiest sample has {np.min(c):g}"
                         if not p.percent else "%") for c, p in zip(columns, paces))
        raise ValueError(f"--pool: no sample is admitted at step 0{' by all of them' * (len(paces) > 1)} ({what}); "
                         "start higher" + ", or by percentile as in --pool=voc:1%..100%:40%" * (len(paces) == 1))
    return out


def reorder(columns, paces, order, seed):
    """Ranks for --pool_order: easy_first leaves them, hard_first turns them round, random deals them out anew: the two
    controls that any claim for a curriculum needs. Both controls need paces by percentile."""
    if order not in ("easy_first", "hard_first", "random"):
        raise ValueError(f"--pool_order={order} is unknown; it takes easy_first, hard_first or random")
    if order == "easy_first":
        return columns
    if not all(p.percent for p in paces):
        raise ValueError(f"--pool_order={order} needs paces by percentile, as in --pool=voc:1%..100%:40%")
    if order == "hard_first":
        return [len(c) - 1 - c for c in columns]
    # samples change places with all their ranks, so that intersections stay as large as they were
    places = np.random.default_rng((seed, 1)).permutation(np.arange(len(columns[0]), dtype=np.int32))
    return [c[places] for c in columns]


# -----------------------------------------------------------------------------
# the sampler


def distinct(rng, n, m):
    """m different numbers below n, in random order: (m,) int64. Cheap where m is far below n, and where n is small."""
    if 4 * m > n:
        return rng.permutation(n)[:m]
    j = rng.integers(0, n, m)
    while True:         # repeats are rare: what is drawn twice counts once, at its first place, and more is drawn
        ordered = np.sort(j)
        if (ordered[1:] != ordered[:-1]).all():
            return j
        j = j[np.sort(np.unique(j, return_index=True)[1])]
        j = np.append(j, rng.integers(0, n, m - len(j)))


class Sampler:
    """Sample ids of every step: uniform over the pool, without replacement, equal for any number of ranks.

    A pass hands out each admitted sample at most once; samples admitted meanwhile join the pass under way; when
    it is used up, the next pass begins over all admitted so far. ids(step) is a function of (seed, step, batch size):
    nothing is saved for a resume, the draws are replayed (20 to 100 us a step).
    Memory: two int32 arrays of N. `admitted_at`: (N,) from admission(), or None for everything at once. global_batch: a
    number, or one number a step (the last one holds on).
    """

    def __init__(self, n_samples, global_batch, seed, admitted_at=None):
        self.n, self.batch, self.seed = n_samples, np.atleast_1d(global_batch), seed
        if n_samples < 1 or self.batch.min() < 1:
            raise ValueError(f"a sampler needs samples and a batch, not {n_samples} and {global_batch}")
        if admitted_at is not None and np.min(admitted_at) > 0:
            raise ValueError("a sampler needs a sample at step 0")
        if admitted_at is None:
            self.order = np.arange(n_samples, dtype=np.int32)
            self.steps, self.sizes = np.zeros(1), np.array([n_samples])
        else:
            self._sort(admitted_at)
        self.rest = np.empty(n_samples, np.int32)   # rest[:left] = what this pass has still to hand out
        self._restart()

    def _sort(self, admitted_at):
        """order: sample ids by (admission step, id), so that every pool is a prefix; a counting sort, chunk by chunk,
        for memory's sake. steps: where the pool grows; sizes: to how many."""
        self.steps, counts = np.unique(admitted_at, return_counts=True)
        self.sizes, self.order = counts.cumsum(), np.empty(self.n, np.int32)
        code_of = np.zeros(self.steps[self.steps < NEVER].max(initial=-1) + 2, np.min_scalar_type(len(self.steps)))
        code_of[self.steps[self.steps < NEVER]] = np.arange((self.steps < NEVER).sum())
        code_of[-1] = len(self.steps) - 1                       # NEVER, cut down to the table's last place
        at = self.sizes - counts                                # where each step's next sample goes
        for i in range(0, self.n, CHUNK):
            code = code_of[np.minimum(admitted_at[i:i + CHUNK], len(code_of) - 1)]      # at most 16 bits sort fast
            count = np.bincount(code, minlength=len(at))
            within = np.arange(len(code)) - np.repeat(count.cumsum() - count, count)
            self.order[np.repeat(at, count) + within] = i + np.argsort(code, kind="stable")
            at += count

    def _restart(self):
        self.rng, self.step, self.left, self.joined, self.passes = np.random.default_rng(self.seed), 0, 0, 0, 0

    def pool_size(self, step):
        """Samples admitted at step(s): int64 of the same shape."""
        i = np.searchsorted(self.steps, step, side="right") - 1
        return np.where(i >= 0, self.sizes[np.maximum(i, 0)], 0)

    def ids(self, step):
        """Sample ids of the global batch of `step`: (global_batch,) int64. Cheapest when asked in order."""
        if step < self.step:
            self._restart()
        while self.step <= step:
            out = self._draw()
        return out

    def _draw(self):
        pool = int(self.pool_size(self.step))
        new = pool - self.joined
        if new:                                     # newcomers join the pass under way
            self.rest[self.left:self.left + new] = self.order[self.joined:pool]
            self.left, self.joined = self.left + new, pool
        picked, need = [], int(self.batch[min(self.step, len(self.batch) - 1)])
        while need:
            if not self.left:                       # the pass is used up: the next one is over all admitted so far
                self.rest[:pool] = self.order[:pool]
                self.left, self.passes = pool, self.passes + 1
            n = min(need, self.left)
            j = distinct(self.rng, self.left, n)
            picked.append(self.rest[j])
            # close the gaps: what survives of the last n places moves into the places that were taken before them
            tail, survives = self.left - n, np.ones(n, bool)
            survives[j[j >= tail] - tail] = False
            self.rest[j[j < tail]] = self.rest[tail:self.left][survives]
            self.left, need = tail, need - n
        self.step += 1
        return np.concatenate(picked).astype(np.int64)


# -----------------------------------------------------------------------------
# what happens to the drawn rows when the length is paced


def truncate(rows, length):
    """Keep each row's first `length` inputs. rows: (B, T+1) tokens, -1 for padding; returns x, y of (B, length), y
    shifted by one. Padding is token 0 in x and stays -1 in y, which has no loss."""
    return np.maximum(rows[:, :length], 0), rows[:, 1:length + 1]


def reshape(rows, length, ignore=-1):
    """Cut each row into pieces of `length`, so that nothing is thrown away; positions restart in each piece.

    rows: (B, T+1) tokens; returns x, y of (B * ceil(T / length), length). Where length does not divide T the last
    piece is shorter: it is padded with token 0 and its labels with `ignore`, so that it weighs what it holds.
    """
    b, t = rows.shape[0], rows.shape[1] - 1
    pieces = -(-t // length)
    x = np.zeros((b, pieces * length), rows.dtype)
    y = np.full((b, pieces * length), ignore, np.int64)
    x[:, :t], y[:, :t] = rows[:, :-1], rows[:, 1:]
    return x.reshape(b * pieces, length), y.reshape(b * pieces, length)     # (B, P*L) -> (B*P, L)
