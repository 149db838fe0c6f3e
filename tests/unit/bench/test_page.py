"""bench/peers/page.py: what the table says of a row."""

from __future__ import annotations

from typing import Any

from bench.peers.page import HEAD, cells, table

ROW: dict[str, Any] = {
    "system": "torchft",
    "variant": "tuned",
    "interval": 15.0,
    "samples_per_second": 31.0,
    "goodput": 0.7754,
    "kills": 3,
    "missed_kills": 1,
    "pauses": [1.0, 4.0, 2.5],
    "lost": 8,
    "repeated": 2,
    "in_vain": 40,
    "steps": 100,
    "uneven_steps": 7,
    "deviation": {"steps": 90, "loss": 0.0123, "first_step": 31},
}


def test_a_row_under_kills() -> None:
    said = dict(zip(HEAD, cells(ROW), strict=True))
    assert said["a kill every"] == "15 s"
    assert said["kills"] == "3 (1 found no worker up)"
    assert said["goodput"] == "0.775"
    assert said["pause a kill: median"] == "2.50 s"
    assert said["longest"] == "4.00 s"
    assert (said["samples lost"], said["repeated"], said["in vain"]) == ("8", "2", "40")
    assert said["batch held"] == "no: 7 of 100 steps"
    assert said["final loss off by"] == "1.2e-02"
    assert said["parameters"] == "others from step 31"


def test_an_exact_row() -> None:
    row = {**ROW, "uneven_steps": 0, "missed_kills": 0, "deviation": {"steps": 90, "loss": 0.0, "first_step": None}}
    said = dict(zip(HEAD, cells(row), strict=True))
    assert (said["kills"], said["batch held"]) == ("3", "yes")
    assert (said["final loss off by"], said["parameters"]) == ("0", "the same")


def test_an_undisturbed_row_gives_its_rate() -> None:
    said = dict(zip(HEAD, cells({**ROW, "interval": None, "kills": 0, "missed_kills": 0, "pauses": []}), strict=True))
    assert (said["a kill every"], said["goodput"]) == ("undisturbed", "31.0 samples/s")
    assert said["final loss off by"] == said["parameters"] == said["longest"] == ""


def test_every_line_of_the_table_has_all_columns() -> None:
    assert {line.count("|") for line in table([ROW, ROW]).splitlines()} == {len(HEAD) + 1}
