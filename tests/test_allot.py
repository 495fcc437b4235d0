from itertools import product

import numpy as np
import pytest

from selfspec.plan.allot import allot, longest, partition


def staircase(rng):
    """Costs by number of rows: flat within a bucket, as under CUDA graphs."""
    base, per, bucket = rng.random(3) + np.array([0.5, 0.01, 0])
    size = int(1 + 6 * bucket)
    return lambda rows: base + per * (-(-rows // size) * size) ** 1.1


@pytest.mark.parametrize("seed", range(30))
def test_no_other_lengths_are_better(seed):
    rng = np.random.default_rng(seed)
    n, depth = rng.integers(1, 4), rng.integers(1, 5)
    survival = np.cumprod(rng.random((n, depth)), 1)
    cost, rate = staircase(rng), 2 * rng.random()

    def value(lengths):
        return sum(survival[i, :k].sum() for i, k in enumerate(lengths)) - rate * cost(n + sum(lengths))

    found = allot(survival, cost, rate)
    best = max(product(range(depth + 1), repeat=n), key=value)
    assert value(found.tolist()) == pytest.approx(value(best))


def test_rows_go_where_they_survive():
    survival = np.cumprod([[0.9] * 4, [0.2] * 4], 1)
    assert allot(survival, lambda rows: 0.3 * rows, 1.0).tolist() == [4, 0]
    assert allot(survival, lambda rows: 1.0, 1.0).tolist() == [4, 4]  # free rows are taken
    assert allot(survival, lambda rows: 9.0 * rows, 1.0).tolist() == [0, 0]


def test_ties_do_not_leave_holes():
    assert allot(np.ones((2, 3)), lambda rows: 1.0 if rows <= 5 else 9.0, 1.0).tolist() == [3, 0]


def test_a_rectangle_pays_for_its_longest():
    survival = np.cumprod([[0.9] * 7, [0.1] * 7, [0.1] * 7], 1)
    assert longest(survival, [1, 2, 4, 8], lambda v: 0.2 * 3 * v, 1.0) == 4
    assert longest(survival[:1], [1, 2, 4, 8], lambda v: 0.1 * v, 1.0) == 8


@pytest.mark.parametrize("seed", range(30))
def test_no_other_split_over_two_shapes_is_better(seed):
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(1, 6)), 3
    tokens = 1 + 6 * rng.random((n, k))
    ms = np.concatenate([np.zeros((k, 1)), np.cumsum(rng.random((k, n)), 1) + rng.random((k, 1))], 1)

    def rate(choice):
        counts = np.bincount(choice, minlength=k)
        return tokens[np.arange(n), choice].sum() / sum(ms[s, m] for s, m in enumerate(counts))

    found = partition(tokens, ms)
    choice = np.empty(n, int)
    for shape, members in found:
        choice[members] = shape
    assert sorted(i for _, members in found for i in members) == list(range(n))
    allowed = [np.array(c) for c in product(range(k), repeat=n) if len(set(c)) <= 2]
    assert rate(choice) == pytest.approx(max(map(rate, allowed)))


def test_a_split_has_to_pay_for_its_second_launch():
    tokens = np.array([[1.0, 8.0], [1.0, 1.1]])
    cheap, dear = np.array([[0, 1.0, 1.0], [0, 2.0, 8.0]]), np.array([[0, 1.0, 1.0], [0, 2.0, 2.0]])
    assert partition(tokens, cheap) == [(0, [1]), (1, [0])]
    assert partition(tokens, dear) == [(1, [0, 1])]
    assert partition(tokens, cheap, [0]) == [(0, [0, 1])]
