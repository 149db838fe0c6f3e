from __future__ import annotations

from collections.abc import Iterator

import pytest
from two_hosts import TwoHosts, missing


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if reason := missing():
        pytest.skip(reason)
    opened = None
    try:
        opened = TwoHosts()
        yield opened
    finally:
        if opened is not None:
            opened.close()
