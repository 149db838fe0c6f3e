from __future__ import annotations

from collections.abc import Iterator

import pytest
from two_hosts import TwoHosts, two_hosts


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as opened:
        yield opened
