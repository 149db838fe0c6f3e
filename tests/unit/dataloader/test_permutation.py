"""A fast shuffle is worth nothing if it repeats an index at some sizes, so sizes are tried one by one."""

from hashlib import shake_256
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloader.permutation import LARGEST, Permutation


def assert_bijection(n: int, key: bytes) -> None:
    permutation = Permutation(n, key)
    order = permutation.at(np.arange(n))
    assert order.dtype == np.int64
    assert order.min() >= 0
    assert (np.bincount(order, minlength=n) == 1).all(), f"no bijection at n = {n}"
    assert (permutation.inverse(order) == np.arange(n)).all(), f"wrong inverse at n = {n}"


def test_every_size_up_to_2000_is_a_bijection():
    for n in range(1, 2001):
        assert_bijection(n, b"key %d" % n)


@pytest.mark.parametrize("power", range(11, 18))
def test_sizes_about_a_power_of_two_are_bijections(power):
    for n in (2**power - 1, 2**power, 2**power + 1):
        assert_bijection(n, b"key")


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**32 + 1, 2**40 - 1, 2**40, 2**40 + 1, 300_000_000, LARGEST])
def test_large_sizes_have_an_inverse(n):
    permutation = Permutation(n, b"large")
    places = np.unique(np.concatenate([np.arange(300), n - 1 - np.arange(300), np.arange(1, 400) * (n // 400)]))
    values = permutation.at(places)
    assert values.min() >= 0
    assert values.max() < n
    assert len(np.unique(values)) == len(places)
    assert (permutation.inverse(values) == places).all()
    assert (permutation.at(permutation.inverse(places)) == places).all()


@given(st.integers(1, LARGEST), st.binary(max_size=20), st.data())
def test_inverse_undoes_at_for_any_size_and_key(n, key, data):
    permutation = Permutation(n, key)
    place = data.draw(st.integers(0, n - 1))
    value = permutation.at(np.array([place]))
    assert 0 <= value[0] < n
    assert permutation.inverse(value)[0] == place


def test_one_place_alone_and_a_batch_of_any_shape_agree():
    permutation = Permutation(12_345, b"shape")
    whole = permutation.at(np.arange(12).reshape(3, 4))
    assert whole.shape == (3, 4)
    assert [int(permutation.at(np.array(i))) for i in range(12)] == whole.reshape(-1).tolist()
    assert permutation.at(np.arange(12, dtype=np.uint8)).tolist() == whole.reshape(-1).tolist()
    assert permutation.at(np.empty(0, dtype=np.int64)).shape == (0,)


def test_the_order_is_a_format():
    """Jobs that were begun must go on in the same order."""
    assert Permutation(10, b"a").at(np.arange(10)).tolist() == GOLDEN_TEN
    assert Permutation(2**40 + 1, b"7/0").at(np.array([0, 1, 2**40])).tolist() == GOLDEN_LARGE


GOLDEN_TEN = [6, 4, 9, 8, 1, 5, 0, 7, 3, 2]
GOLDEN_LARGE = [70193725861, 840811849283, 362566639368]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9, 10, 16, 17, 1000, 2**20, 2**40 - 1, 2**40 + 1, LARGEST - 1, LARGEST])
def test_the_order_follows_the_documented_rule(n):
    places = sorted({place for place in (0, 1, 2, 3, n // 2, n - 2, n - 1) if 0 <= place < n})
    values = Permutation(n, b"rule").at(np.array(places))
    assert values.tolist() == [by_hand(n, b"rule", place) for place in places]


def by_hand(n: int, key: bytes, place: int) -> int:
    """The documented rule in plain Python integers, one number at a time."""
    rows = next(a for a in range(max(1, int(n**0.5) - 2), n + 1) if a * a >= n)
    columns = -(-n // rows)
    stretched = shake_256(key).digest(96)
    while True:
        left, right = divmod(place, columns)
        for number in range(12):
            round_key = int.from_bytes(stretched[8 * number : 8 * number + 8], "little")
            word = ((left if number % 2 else right) * 0x9E3779B97F4A7C15 + round_key) % 2**64
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
            word ^= word >> 31
            if number % 2:
                right = (right + word) % columns
            else:
                left = (left + word) % rows
        place = left * columns + right
        if place < n:
            return place


@pytest.mark.parametrize(("n", "bad"), [(5, [-1]), (5, [0, 5]), (1, [1])])
def test_places_outside_are_refused(n, bad):
    with pytest.raises(IndexError, match="outside"):
        Permutation(n, b"").at(np.array(bad))
    with pytest.raises(IndexError, match="outside"):
        Permutation(n, b"").inverse(np.array(bad))


def test_fractions_are_refused():
    with pytest.raises(TypeError, match="integers"):
        Permutation(5, b"").at(np.array([0.5]))


@pytest.mark.parametrize("n", [0, -1, LARGEST + 1])
def test_impossible_sizes_are_refused(n):
    with pytest.raises(ValueError, match="between 1 and"):
        Permutation(n, b"")


# Statistics. Keys are fixed, so these never fail by chance; the bounds are some five standard deviations wide.


@pytest.mark.parametrize("n", [2, 3, 6, 11])
def test_each_value_comes_to_each_place_equally_often(n):
    keys = 1500
    orders = np.stack([Permutation(n, b"%d" % key).at(np.arange(n)) for key in range(keys)])
    counts = np.stack([np.bincount(orders[:, place], minlength=n) for place in range(n)])
    freedom = (n - 1) ** 2
    chi_squared = ((counts - keys / n) ** 2 / (keys / n)).sum()
    assert chi_squared < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("n", [3, 5])
def test_each_pair_of_values_comes_to_neighbouring_places_equally_often(n):
    keys = 1500
    orders = np.stack([Permutation(n, b"pair %d" % key).at(np.arange(n)) for key in range(keys)])
    for left, right in pairwise(range(n)):
        pairs = orders[:, left] * n + orders[:, right]
        counts = np.bincount(pairs, minlength=n * n).reshape(n, n)[~np.eye(n, dtype=bool)]
        freedom = n * (n - 1) - 1
        expected = keys / (n * (n - 1))
        assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("n", [4096, 10_007, 2**16 + 1])
def test_an_order_shows_no_trend(n):
    order = Permutation(n, b"trend").at(np.arange(n))
    assert (order == np.arange(n)).sum() < 10
    assert (np.diff(order) == 1).sum() < 10
    assert len(np.unique(np.diff(order))) > n // 3  # steps of one length would be a stride, not a shuffle
    for lag in (1, 2, 3, 64, 256):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 5 / np.sqrt(n)
    in_tenths = np.bincount(np.arange(n) * 10 // n * 10 + order * 10 // n, minlength=100)
    assert abs(in_tenths - n / 100).max() < 5 * np.sqrt(n / 100)


def test_other_keys_give_unrelated_orders():
    n = 10_007
    orders = [Permutation(n, b"7/%d" % epoch).at(np.arange(n)) for epoch in range(6)]
    for a in range(6):
        for b in range(a):
            assert (orders[a] == orders[b]).sum() < 10
            assert abs(np.corrcoef(orders[a], orders[b])[0, 1]) < 5 / np.sqrt(n)
            assert len(np.unique((orders[a] - orders[b]) % n)) > n // 3  # not the same order moved along
