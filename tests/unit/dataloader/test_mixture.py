"""The schedule of sources: every sample once, close to the shares at every prefix, the same from any place on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.errors import ConfigError
from dataloader.mixture import Mixture, whole_weights

MIXTURES = [
    (1,),
    (1, 1),
    (7, 3),
    (1, 1, 1),
    (67, 15, 4, 5, 5, 2, 2),  # LLaMA's
    (500, 300, 100, 50, 30, 15, 4, 1),
    (1,) * 17,
    (0, 3, 0, 1),
    (1000, 1, 1, 1, 1),
    (9, 8, 7, 6, 5, 4, 3, 2, 1),
]


def worst_error(mixture: Mixture, samples: int) -> float:
    sources, _ = mixture.at(np.arange(samples))
    taken = np.cumsum(sources[:, None] == np.arange(len(mixture.weights)), axis=0)
    due = np.arange(1, samples + 1)[:, None] * (np.asarray(mixture.weights) / mixture.total)
    return float(np.abs(taken - due).max())


@pytest.mark.parametrize("weights", MIXTURES)
def test_no_prefix_is_off_by_a_sample(weights: tuple[int, ...]) -> None:
    mixture = Mixture(weights)
    assert mixture.bound < 1.0
    assert worst_error(mixture, min(2 * mixture.total, 20_000)) <= mixture.bound + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=14).filter(any))
def test_each_sample_of_each_source_comes_once_and_in_order(weights: list[int]) -> None:
    mixture, samples = Mixture(weights), 1500
    sources, numbers = mixture.at(np.arange(samples))
    for source in range(len(weights)):
        assert numbers[sources == source].tolist() == list(range(mixture.counts(samples)[source]))
    assert worst_error(mixture, samples) <= mixture.bound + 1e-9
    assert mixture.bound < 1.1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=8),
    st.integers(0, 2**48),
)
def test_far_out_and_for_any_weights_it_is_exact(weights: list[int], first: int) -> None:
    """Beyond 63 bits as well; and any place can be asked by itself."""
    mixture = Mixture(weights)
    sources, numbers = mixture.at(np.arange(first, first + 40))
    counts = mixture.counts(first)
    for place, (source, number) in enumerate(zip(sources.tolist(), numbers.tolist(), strict=True)):
        assert number == counts[source]
        counts = tuple(count + (one == source) for one, count in enumerate(counts))
        assert counts == mixture.counts(first + place + 1)
    assert sum(counts) == first + 40
    assert all(
        abs(count - (first + 40) * w / mixture.total) <= mixture.bound + 1e-2
        for count, w in zip(counts, weights, strict=True)
    )


def test_when_a_source_has_given_so_many() -> None:
    mixture = Mixture((5, 3, 1))
    for source in range(3):
        for number in range(1, 40):
            reached = mixture.reaches(source, number)
            assert mixture.counts(reached)[source] == number
            assert mixture.counts(reached - 1)[source] == number - 1


def test_weights_are_the_decimal_numbers_that_were_written() -> None:
    assert whole_weights((0.1, 0.2, 0.7), "abc") == (1, 2, 7)
    assert whole_weights((1e-9, 1.0), "ab") == (1, 10**9)
    assert whole_weights((3, 0, 6), "abc") == (1, 0, 2)


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused_by_name(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources\.web\.weight: .* give a number of 0 or more"):
        whole_weights((1.0, weight), ("books", "web"))


def test_nothing_to_read() -> None:
    with pytest.raises(ConfigError, match="every weight is 0"):
        whole_weights((0.0, 0.0), "ab")


def test_a_source_of_weight_0_is_never_read() -> None:
    sources, _ = Mixture((0, 3, 0, 1)).at(np.arange(4000))
    assert set(sources.tolist()) == {1, 3}


def test_a_tiny_weight_is_not_rounded_to_nothing() -> None:
    mixture = Mixture(whole_weights((1e-6, 0.5, 0.5 - 1e-6), "abc"))
    assert mixture.counts(3_000_000)[0] == 3
