from collections.abc import Iterator

import pytest

from tests.chaos.house import House, Run, make_house


@pytest.fixture(scope="session")
def house() -> Iterator[House]:
    """One folder for all: the job's data are made once."""
    made = make_house()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _clean(house: House) -> Iterator[None]:
    """A test that failed leaves nothing to the next."""
    yield
    house.eye.sweep()


@pytest.fixture(scope="session")
def reference(house: House) -> Run:
    """Two nodes with two workers each, undisturbed."""
    return house.train("reference")
