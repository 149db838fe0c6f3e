from pathlib import Path

import pytest
from pydantic import ValidationError

from dataloader.config import DataConfig


def test_the_default_source_is_the_standard_library():
    config = DataConfig(seq_len=128)
    assert (config.source, config.path, config.vocab_size, config.shuffle_seed) == ("stdlib", None, 4096, None)


def test_a_path_replaces_the_default_source():
    config = DataConfig(seq_len=8, path="/some/where")
    assert (config.source, config.path) == (None, Path("/some/where"))


@pytest.mark.parametrize("given", [{}, {"path": "/some/where"}])
def test_what_is_dumped_can_be_read_again(given):
    config = DataConfig(seq_len=8, **given)
    assert DataConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"seq_len": 8, "source": "stdlib", "path": "/x"}, "data.source and data.path are both given"),
        ({"seq_len": 8, "source": None}, "set data.source: stdlib"),
        ({"seq_len": 8, "source": "wikipedia"}, "source"),
        ({}, "seq_len"),
        ({"seq_len": 0}, "seq_len"),
        ({"seq_len": 2**63}, "seq_len"),
        ({"seq_len": 8, "vocab_size": 256}, "vocab_size"),
        ({"seq_len": 8, "shuffle_seed": -1}, "shuffle_seed"),
        ({"seq_len": 8, "sequence_length": 8}, "sequence_length"),
    ],
)
def test_bad_values_are_named(given, named):
    with pytest.raises(ValidationError, match=named):
        DataConfig(**given)
