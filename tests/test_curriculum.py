"""curriculum.py: golden values of the published formulas, and the promises of the sampler."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import curriculum
from curriculum import NEVER, Pace, Sampler, admission, pace, ranks, reorder, reshape, truncate

GOLDEN = [  # (steps, start, end, duration, root, multiple, limits)
    ([0, 6, 7, 25, 50, 75, 99, 100, 200], 8, 128, 100, 1, 8, [8, 8, 16, 32, 64, 96, 120, 128, 128]),
    (range(13), 8, 128, 10, 1, 16, [16, 16, 32, 32, 48, 64, 80, 80, 96, 112, 128, 128, 128]),
    (range(13), 8, 128, 10, 2, 16, [16, 32, 48, 64, 80, 80, 96, 96, 112, 112, 128, 128, 128]),
    ([0, 1, 4, 9, 25, 36, 50, 64, 81, 99, 100], 8, 128, 100, 2, 8, [8, 16, 32, 40, 64, 80, 88, 104, 112, 120, 128]),
    ([0, 1, 8, 27, 50, 64, 100], 8, 128, 100, 3, 8, [8, 32, 56, 80, 96, 104, 128]),
    ([118, 119, 7500, 14999, 15000], 8, 1024, 15000, 1, 8, [8, 16, 512, 1016, 1024]),
    ([1, 11, 12, 110, 1100, 11000, 27500, 55000, 109999, 110000], 1, 100, 110000, 2, 1, [1, 1, 2, 4, 10, 32, 50, 71, 99, 100]),
    ([447, 448, 55000, 109999, 110000], 80, 2048, 110000, 1, 8, [80, 88, 1064, 2040, 2048]),
    ([0, 1666, 1667, 3334, 100000, 199999, 200000], 128, 2048, 200000, 1, 16, [128, 128, 144, 160, 1088, 2032, 2048]),
    ([10, 11, 1000], 16, 100, 10, 1, 16, [100, 100, 100]),
]


@pytest.mark.parametrize("steps,start,end,duration,root,multiple,want", GOLDEN)
def test_pace_gives_the_published_limits(steps, start, end, duration, root, multiple, want):
    """C01: never below the first multiple of START, and END is reached exactly."""
    assert pace(list(steps), start, end, duration, root, multiple).tolist() == want
    assert [int(pace(t, start, end, duration, root, multiple)) for t in steps] == want      # one step at a time, too


def test_kept_tokens_of_the_gpt3_recipe_take_121_values():
    assert len(np.unique(pace(np.arange(200_001), 128, 2048, 200_000, 1, 16))) == 121


@pytest.mark.parametrize("bad", [dict(start=200), dict(multiple=0), dict(root=0), dict(start=-8), dict(duration=-1)])
def test_pace_refuses_settings_without_meaning(bad):
    with pytest.raises(ValueError):
        pace(0, **{**dict(start=8, end=128, duration=10, root=2, multiple=8), **bad})


@pytest.mark.parametrize("duration", [1, 7, 100, 12345])
@pytest.mark.parametrize("root", [1, 2, 3, 5])
def test_pace_is_exact_in_integer_arithmetic(duration, root):
    """d is the largest integer with (d - start)^root * duration <= (end - start)^root * t."""
    start, end, t = 8, 1032, np.unique(np.linspace(0, duration - 1, 200).astype(int))
    for step, d in zip(t.tolist(), pace(t, start, end, duration, root).tolist()):
        assert (d - start) ** root * duration <= (end - start) ** root * step < (d + 1 - start) ** root * duration, (step, d)


def test_pace_grammar_reads_every_form(tmp_path):
    p = Pace.parse("voc:1%..100%:40%:sqrt")
    assert (p.name, p.start, p.end, p.percent, p.duration, p.relative, p.shape) == ("voc", 1, 100, True, 40, True, "sqrt")
    assert p.at([0, 100, 400], 1000).tolist() == [1, 50, 100]
    assert Pace.parse("80..2048:100", named=False).at([0, 50, 100], 9, 8).tolist() == [80, 1064, 2048]
    assert Pace.parse("truncate:25%..100%:50%").at([0, 5], 10, 8, 256).tolist() == [64, 256]
    assert Pace.parse("16..64:3:constant", named=False).at([0, 2, 3], 9, 16).tolist() == [16, 16, 64]
    assert Pace.parse("zlib:0.2..0.9:10").limit([0, 5, 10], 10).tolist() == pytest.approx([.2, .55, .9])
    (tmp_path / "my.py").write_text("def stairs(step):\n    return 32 if step < 5 else 64\n")
    assert Pace.parse(f"truncate:16..128:10:{tmp_path}/my.py:stairs").at([0, 4, 5, 9], 10, 8).tolist() == [32, 32, 64, 64]


def test_discrete_levels_hold_up_to_and_with_their_last_step():
    p = Pace.parse("truncate:16..64:9:16@2,32@5")
    assert p.at(range(8), 100, 8).tolist() == [16, 16, 16, 32, 32, 32, 64, 64]
    assert Pace.parse("truncate:25%..100%:9:25@0,50@1").at([0, 1, 2], 9, 8, 256).tolist() == [64, 128, 256]


def test_pool_order_turns_the_difficulties_round_or_deals_them_anew():
    values, p = np.arange(10.), [Pace.parse("m:10%..100%:9")]
    def first(order, seed=0):
        return np.flatnonzero(admission(reorder([ranks(values)], p, order, seed), p, 10, 10) == 0).tolist()
    assert first("easy_first") == [0] and first("hard_first") == [9]
    assert len({tuple(first("random", s)) for s in range(20)}) > 3 and first("random", 5) == first("random", 5)
    with pytest.raises(ValueError, match="percentile"):
        reorder([values], [Pace.parse("m:1..5:9")], "hard_first", 0)
    with pytest.raises(ValueError, match="hard_first"):
        reorder([values], p, "hardest", 0)


@pytest.mark.parametrize("text", ["voc", "voc:1..2", "voc:1%..100:40%", "1..2:3", "voc:a..b:3", "voc:5..2:10", "voc:1%..200%:5", "voc:1..2:3:cube", "voc:1..2:3:root0", "voc:1..9:3:1.2.3@5", ""])
def test_a_malformed_pace_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="voc:1%..100%:40%:sqrt"):
        Pace.parse(text)


def test_levels_that_fall_and_functions_without_a_number_are_refused(tmp_path):
    for text in ("truncate:8..16:40:8@20,16@9", "truncate:8..16:40:16@9,8@20"):
        with pytest.raises(ValueError, match="must rise"):
            Pace.parse(text)
    (tmp_path / "p.py").write_text("def f(step): return float('nan')")
    with pytest.raises(ValueError, match="no finite number at step 0"):
        Pace.parse(f"truncate:8..16:40:{tmp_path}/p.py:f").at(np.arange(3), 100)


def test_fractions_of_a_percent_are_not_rounded():
    n, p = 10_000, Pace.parse("m:0.2%..0.8%:40")
    values = np.random.default_rng(0).integers(0, 5000, n)
    got = admission([ranks(values)], [p], 50, 50)
    assert [(got <= t).sum() for t in (0, 20, 40, 49)] == [20, 50, 80, 80]


def test_a_sampler_without_a_sample_at_step_0_is_refused():
    with pytest.raises(ValueError, match="step 0"):
        Sampler(3, 2, 0, np.array([1, 1, 1], np.int32))


def test_random_order_keeps_the_size_of_an_intersection():
    r = np.random.default_rng(0)
    a = r.normal(size=1000)
    columns, paces = [ranks(a), ranks(a + r.normal(size=1000))], [Pace.parse("a:20%..100%:9"), Pace.parse("b:20%..100%:9")]
    easy = admission(columns, paces, 10, 10)
    random = admission(reorder(columns, paces, "random", 3), paces, 10, 10)
    assert np.array_equal(np.sort(easy), np.sort(random)) and not np.array_equal(easy, random)


VALUES = np.array([3, 1, 2, 3, 1, 1, 2, 5, 5, 4])


def test_admission_by_value_is_metric_at_most_limit():
    got = admission([VALUES], [Pace.parse("m:1..5:4")], 6, 6)           # limits 1 2 3 4 5 5
    assert got.tolist() == (VALUES - 1).tolist()
    assert admission([VALUES], [Pace.parse("m:1..3:2")], 6, 6)[7] == NEVER
    for value, ids in {1: [1, 4, 5], 2: [2, 6], 3: [0, 3], 4: [9], 5: [7, 8]}.items():
        assert np.flatnonzero(got == value - 1).tolist() == ids


def test_admission_by_percentile_is_the_easiest_share_with_ties_by_id():
    p = Pace.parse("m:1%..100%:99")
    got = admission([ranks(VALUES)], [p], 100, 100)
    order = np.argsort(VALUES, kind="stable")
    for t in range(100):
        size = max(1, -(-len(VALUES) * int(p.limit(t, 100)) // 100))
        assert sorted(np.flatnonzero(got <= t)) == sorted(order[:size]), t


def test_several_metrics_admit_the_intersection_and_pools_are_nested():
    """N09: thresholds 16 and 50 % together equal the set intersection computed by hand."""
    r = np.random.default_rng(0)
    a, b = r.integers(0, 32, 500), r.normal(size=500)
    steps = admission([a, ranks(b)], [Pace.parse("a:4..16:10"), Pace.parse("b:20%..50%:10:sqrt")], 20, 20)
    before = set()
    for t in range(20):
        in_a = {i for i in range(500) if a[i] <= pace(t, 4, 16, 10)}
        n_b = -(-500 * int(pace(t, 20, 50, 10, 2)) // 100)
        pool = set(np.flatnonzero(steps <= t).tolist())
        assert pool == in_a & set(np.argsort(b, kind="stable")[:n_b].tolist())
        assert before <= pool
        before = pool


def test_an_empty_first_pool_is_refused_with_limit_and_easiest_value():
    with pytest.raises(ValueError, match="begins at 1, the easiest sample has 3"):
        admission([np.array([3, 4])], [Pace.parse("m:1..5:9")], 10, 10)
    with pytest.raises(ValueError, match="no finite m"):
        admission([np.array([3, np.nan])], [Pace.parse("m:1..5:9")], 10, 10)


def test_each_pass_hands_out_every_admitted_sample_exactly_once():
    """S06, S07: other orders every pass, both functions of the seed; no sample is left out for ever."""
    s = Sampler(10, 4, seed=7)
    drawn = np.concatenate([s.ids(t) for t in range(50)]).reshape(-1, 10)
    assert all(sorted(p) == list(range(10)) for p in drawn.tolist())
    assert len({tuple(p) for p in drawn.tolist()}) > 15
    again = Sampler(10, 4, seed=7)
    assert np.array_equal(np.concatenate([again.ids(t) for t in range(50)]).reshape(-1, 10), drawn)
    assert not np.array_equal(Sampler(10, 4, seed=8).ids(0), s.ids(0))


def test_newcomers_join_the_pass_under_way():
    admitted = np.repeat([0, 2], [6, 6])
    s = Sampler(12, 2, 0, admitted)
    first = np.concatenate([s.ids(t) for t in range(6)])             # 12 draws: 6 old, 6 new, nobody twice
    assert sorted(first) == list(range(12)) and set(first[:4]) <= set(range(6))
    assert [s.pool_size(t) for t in (0, 1, 2, 9)] == [6, 6, 12, 12]


def test_a_pool_smaller_than_the_batch_is_passed_over_evenly():
    counts = np.bincount(Sampler(3, 32, 0).ids(0), minlength=3)
    assert counts.max() - counts.min() <= 1
    assert np.bincount(Sampler(9, 32, 0, np.repeat([0, 5], [1, 8])).ids(3)).tolist() == [32]


def test_draws_are_uniform_over_the_pool():
    """Chi-square over the first place of the batch: 400 seeds, 8 samples; 24.3 is the 0.1 % point for 7 degrees."""
    counts = np.bincount([Sampler(8, 2, seed).ids(0)[0] for seed in range(400)], minlength=8)
    assert ((counts - 50) ** 2 / 50).sum() < 24.3


def test_a_resumed_sampler_equals_the_uninterrupted_one_and_moves_no_global_generator():
    """R01, R02, R12, R13: asked for step 30 at once, backwards, or in order, and numpy's global state untouched."""
    admitted = np.random.default_rng(3).integers(0, 20, 97)
    admitted[0] = 0
    a, state = Sampler(97, 8, 7, admitted), np.random.get_state()[1].tolist()
    want = [a.ids(t).tolist() for t in range(60)]
    for start in (30, 59, 3):
        b = Sampler(97, 8, 7, admitted)
        assert [b.ids(t).tolist() for t in range(start, 60)] == want[start:]
    assert a.ids(10).tolist() == want[10]
    assert np.random.get_state()[1].tolist() == state


def test_truncate_keeps_the_first_inputs_and_shifts_the_labels():
    """D13: x and y both (B, L), y[i] == x[i + 1]."""
    rows = np.arange(22).reshape(2, 11)
    x, y = truncate(rows, 4)
    assert x.tolist() == [[0, 1, 2, 3], [11, 12, 13, 14]] and y.tolist() == [[1, 2, 3, 4], [12, 13, 14, 15]]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9, 10])
def test_reshape_keeps_every_token_and_label_once(length):
    rows = np.arange(1, 23).reshape(2, 11)
    x, y = reshape(rows, length)
    assert x.shape == y.shape == (2 * -(-10 // length), length)
    real = y >= 0
    assert x[real].tolist() == rows[:, :-1].ravel().tolist() and y[real].tolist() == rows[:, 1:].ravel().tolist()
    assert (x[~real] == 0).all()


# -----------------------------------------------------------------------------
# random curricula


@st.composite
def curricula(draw):
    """(columns, paces, brute): one to three metrics over up to 60 samples, whole or fractional values with many ties; brute(t) is the pool by definition."""
    n, rng = draw(st.integers(1, 60)), np.random.default_rng(draw(st.integers(0, 2**32)))
    columns, paces, tests = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        values = rng.integers(0, draw(st.integers(1, 12)), n) / draw(st.sampled_from([1, 1, 4]))
        values = values.astype(draw(st.sampled_from([np.int32, np.float64])) if (values % 1 == 0).all() else np.float64)
        shape = draw(st.sampled_from(["", ":sqrt", ":root3", ":constant"]))
        duration, percent = draw(st.integers(0, 30)), draw(st.booleans())
        if percent:
            low = draw(st.integers(0, 100))
            p = Pace.parse(f"m:{low}%..{draw(st.integers(low, 100))}%:{duration}{shape}")
            order = sorted(range(n), key=lambda i, v=values: (v[i], i))
            tests.append(lambda t, p=p, order=order: set(order[:max(1, -(-n * int(p.limit(t, 30)) // 100))]))
        else:
            low = int(values.min()) + 1
            p = Pace.parse(f"m:{low}..{low + draw(st.integers(0, 12))}:{duration}{shape}")
            tests.append(lambda t, p=p, v=values: {i for i in range(n) if v[i] <= p.limit(t, 30)})
        columns.append(ranks(values) if percent else values)
        paces.append(p)
    return columns, paces, lambda t: set.intersection(*(f(t) for f in tests))


@given(curricula())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_pools_are_nested_and_the_intersection_that_the_definition_gives(case):
    columns, paces, brute = case
    if not brute(0):
        with pytest.raises(ValueError, match="no sample is admitted at step 0"):
            admission(columns, paces, 32, 30)
        return
    got, before = admission(columns, paces, 32, 30), set()
    for t in range(32):
        pool = set(np.flatnonzero(got <= t).tolist())
        assert pool == brute(t) and before <= pool
        before = pool


@given(st.lists(st.integers(0, 12), min_size=1, max_size=50), st.integers(1, 20), st.integers(0, 99))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_pass_gives_each_admitted_sample_once_and_stragglers_join_it(admitted, batch, seed):
    """Against a sampler of sets: a draw must come from what the pass still owes, and a new pass begins only when it owes nothing."""
    admitted = np.array(admitted) - min(admitted)
    admitted[admitted == 12] = NEVER
    s, owed, known = Sampler(len(admitted), batch, seed, admitted.astype(np.int32)), set(), set()
    for t in range(15):
        pool = set(np.flatnonzero(admitted <= t).tolist())
        owed, known = owed | (pool - known), pool
        assert s.pool_size(t) == len(pool)
        for i in s.ids(t).tolist():
            owed = owed or set(pool)
            assert i in owed
            owed.remove(i)


@given(st.lists(st.sampled_from([0, 1, 2, 2.5, 7]) | st.integers(0, 500), min_size=1, max_size=80))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_ranks_are_places_in_the_order_by_value_and_id(values):
    got = ranks(np.array(values, np.float64))
    assert np.argsort(got).tolist() == sorted(range(len(values)), key=lambda i: (values[i], i)) and got.dtype == np.int32


def test_large_columns_are_worked_on_in_chunks_of_any_size(monkeypatch):
    r = np.random.default_rng(0)
    columns, paces = [ranks(r.normal(size=1000)), r.integers(0, 50, 1000)], [Pace.parse("a:5%..90%:20"), Pace.parse("b:10..40:20")]
    whole = admission(columns, paces, 25, 25)
    want = Sampler(1000, 8, 1, whole)
    monkeypatch.setattr(curriculum, "CHUNK", 7)
    assert np.array_equal(admission(columns, paces, 25, 25), whole)
    got = Sampler(1000, 8, 1, whole)
    assert np.array_equal(got.order, want.order) and np.array_equal(got.sizes, want.sizes) and np.array_equal(want.order, np.argsort(whole, kind="stable"))


def test_every_sample_of_a_pool_is_equally_likely_in_every_place_of_the_batch():
    """Chi-square of (place, sample) over 2,000 seeds, newcomers included: 6 x 12 cells, each place's counts tested on their own.
    11 degrees of freedom: 31.3 is the 0.1 % point; of six places none may pass it for these seeds."""
    admitted = np.repeat([0, 1], [4, 8])
    counts = np.zeros((6, 12))
    for seed in range(2000):
        s = Sampler(12, 2, seed, admitted)
        ids = np.concatenate([s.ids(t) for t in range(4)])[2:]       # after the newcomers came: 10 are left of the pass
        counts[np.arange(6), ids] += 1
    # two of the four old ones are gone by then: each old sample is there with chance 1/2, each new one surely
    expected = 2000 * np.repeat([.5, 1], [4, 8]) / 10
    assert (((counts - expected) ** 2 / expected).sum(1) < 31.3).all()


@pytest.mark.parametrize("n,m", [(5, 5), (40, 10), (41, 10), (1000, 200), (10**9, 500)])
def test_distinct_numbers_are_distinct_below_n_and_uniform(n, m):
    """The mean of m uniform numbers lies within 5 standard errors of n / 2."""
    j = curriculum.distinct(np.random.default_rng(0), n, m)
    assert len(set(j.tolist())) == m == len(j) and 0 <= j.min() and j.max() < n
    assert abs(j.mean() - (n - 1) / 2) < 5 * n / np.sqrt(12 * m)
