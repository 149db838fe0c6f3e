"""Weights that change, and sources that may be read only so often."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.errors import DataError
from dataloader.stages import Source, Stage, Stages

WEB, BOOKS, CODE = Source("web", 1000), Source("books", 40, epochs=2), Source("code", 70, epochs=1)


def test_a_change_of_weights_goes_on_in_each_source() -> None:
    stages = Stages([WEB, Source("math", 50)], [Stage(0, (3, 1)), Stage(100, (1, 1))])
    assert stages.counts(100) == (75, 25)
    assert stages.counts(200) == (125, 75)
    sources, numbers = stages.at(np.arange(200))
    assert numbers[sources == 0].tolist() == list(range(125))
    assert numbers[sources == 1].tolist() == list(range(75))


def test_a_source_ends_after_its_epochs_and_the_others_go_on() -> None:
    stages = Stages([WEB, BOOKS], [Stage(0, (1, 1))])
    sources, numbers = stages.at(np.arange(1000))
    assert numbers[sources == 1].tolist() == list(range(80))
    assert set(sources[160:].tolist()) == {0}
    assert stages.end is None


def test_when_all_have_ended_there_is_nothing_to_read() -> None:
    stages = Stages([BOOKS, CODE], [Stage(0, (1, 1))])
    assert stages.end == 150
    assert stages.counts(150) == (80, 70)
    with pytest.raises(DataError, match="at sample 150 every source"):
        stages.at(np.asarray([149, 150]))


def test_a_source_that_ended_stays_so_in_later_stages() -> None:
    stages = Stages([WEB, CODE], [Stage(0, (0, 1)), Stage(70, (1, 1))])
    sources, _ = stages.at(np.arange(70, 500))
    assert set(sources.tolist()) == {0}


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 5, 3)])
def test_stages_begin_at_0_and_ascend(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="begin at sample 0"):
        Stages([WEB], [Stage(start, (1,)) for start in starts])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.one_of(st.none(), st.integers(1, 3))), min_size=1, max_size=5),
    st.data(),
)
def test_every_sample_of_a_source_comes_once_and_in_order(
    shapes: list[tuple[int, int | None]], data: st.DataObject
) -> None:
    sources = [Source(f"s{n}", samples, epochs) for n, (samples, epochs) in enumerate(shapes)]
    weights = st.lists(st.integers(0, 9), min_size=len(sources), max_size=len(sources)).filter(any).map(tuple)
    starts = sorted({0, *data.draw(st.lists(st.integers(1, 300), max_size=3))})
    stages = Stages(sources, [Stage(start, data.draw(weights)) for start in starts])
    until = 600 if stages.end is None else min(600, stages.end)
    found, numbers = stages.at(np.arange(until))
    for n, source in enumerate(sources):
        mine = numbers[found == n].tolist()
        assert mine == list(range(stages.counts(until)[n]))
        assert source.epochs is None or len(mine) <= source.epochs * source.samples
