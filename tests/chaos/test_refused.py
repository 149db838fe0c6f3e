"""What can't be run ends with one clear line, and nothing is left running."""

from __future__ import annotations

import socket

import pytest

from tests.chaos.house import Ended, House

pytestmark = pytest.mark.timeout(300)

RAISING = """\
from runtime.model.causal_lm import CausalLM

class Raising(CausalLM):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls > 20:
            raise ValueError("no loss today\\nand not tomorrow")
        return super().loss(model, batch)
"""


def test_a_recipe_that_raises_in_mid_training(house: House) -> None:
    (house.folder / "raising.py").write_text(RAISING)
    settings = {"recipe": "raising:Raising", "model.vocab_size": house.vocab_size}
    ended = house(*house.run_arguments("raising", **settings))
    line = refused(house, ended, 3)
    assert "raising:Raising" in line
    assert "loss" in line
    assert "no loss today" in line
    run = house.at("raising")
    assert run.end["state"] == "failed"
    assert run.records


def test_a_port_that_is_taken(house: House) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = house(*house.run_arguments("port", metrics__port=port))
    line = refused(house, ended, 3)
    assert f"metrics.port: {port} is taken on this machine; set another, or 0 for a free one" in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model__hidden_size": 66}, "model.hidden_size: 66, which 4 heads don't divide"),
        ({"cluster__nodes": 5}, "train.logical_ranks: 8 is fewer than the 10 workers"),
    ],
)
def test_a_job_that_can_not_be_run(house: House, settings: dict[str, object], words: str) -> None:
    ended = house(*house.run_arguments("refused", **settings))
    line = refused(house, ended, 2)
    assert words in line
    assert not house.at("refused").path.exists()


def test_a_data_file_that_is_gone(house: House) -> None:
    """Found by the command, before anything is started."""
    file = house.folder / "data" / "train-00000.bin"
    file.rename(file.with_suffix(".away"))
    try:
        ended = house(*house.run_arguments("gone"))
    finally:
        file.with_suffix(".away").rename(file)
    assert str(file) in refused(house, ended, 2)


def test_a_run_directory_that_has_a_run(house: House) -> None:
    ended = house(*house.run_arguments("raising"))
    assert "has a run in it; go on with --resume" in refused(house, ended, 2)


def refused(house: House, ended: Ended, code: int) -> str:
    """The one line."""
    assert ended.code == code, ended.said()
    assert ended.err.startswith("everstep: "), ended.said()
    assert ended.err.count("\n") == 1, ended.said()
    assert "Traceback" not in ended.out
    house.eye.nothing_left()
    return ended.err
