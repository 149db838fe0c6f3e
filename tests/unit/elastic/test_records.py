import fcntl
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloader.errors import DataError, HostError, InternalError
from elastic.record_lines import (
    SAME_BITS_FIELDS,
    Tail,
    differing_field,
    read_events,
    read_ledger,
    record_from_json,
    record_to_json,
)
from elastic.records import EventLog, Ledger
from runtime.protocol import StepRecord

Make = Callable[..., StepRecord]


@given(st.floats(), st.floats(), st.floats())
def test_floats_come_back_to_the_bit(loss: float, grad_norm: float, lr: float) -> None:
    record = StepRecord(0, 1, 4, 2, (0, 16), 2048, loss, grad_norm, lr, "commit", "a", "b", 1.5, 0.25)
    line = json.dumps(record_to_json(record), allow_nan=False)
    again = record_from_json(json.loads(line), "here")
    assert differing_field(record, again) is None
    assert math.copysign(1, again.lr) == math.copysign(1, lr) or math.isnan(lr)


def test_a_line_has_the_documented_fields_in_order(tmp_path: Path, step_record: Make) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.append(replace(step_record(0), phases={"compute": 1.0}))
    fields = "step generation workers copies samples tokens loss grad_norm lr verdict digest data_digest time seconds"
    assert list(json.loads((tmp_path / "ledger.jsonl").read_text())) == fields.split()


def test_append_if_absent(tmp_path: Path, step_record: Make) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        assert ledger.append(step_record(0))
        assert ledger.append(step_record(1))
        assert not ledger.append(step_record(0, generation=9, workers=1, copies=1, time=5.0, seconds=9.0))
        assert ledger.next_step == 2
        assert [ledger.record(step) for step in (-1, 0, 1, 2)] == [None, step_record(0), step_record(1), None]
        with pytest.raises(InternalError, match="step 3 was handed in before step 2"):
            ledger.append(step_record(3))
    assert read_ledger(path) == [step_record(0), step_record(1)]
    with Ledger(path) as ledger:
        assert ledger.next_step == 2
        assert not ledger.append(step_record(1))
        assert ledger.append(step_record(2))


@pytest.mark.parametrize("field", SAME_BITS_FIELDS)
def test_a_step_decided_again_with_other_bits_is_refused(tmp_path: Path, step_record: Make, field: str) -> None:
    other = {"samples": (0, 8), "tokens": 1, "loss": math.nan, "grad_norm": -1.5, "lr": -0.0, "verdict": "skip"}
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.append(step_record(0))
        ledger.append(step_record(1))
        with pytest.raises(InternalError, match=f"step 0 was decided again with another {field}"):
            ledger.append(step_record(0, **{field: other.get(field, "f" * 32)}))


@pytest.mark.parametrize("cut", [1, 5, 40, 200])
def test_a_torn_last_line_is_passed_over_and_cut_off(tmp_path: Path, step_record: Make, cut: int) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append(step_record(0))
        ledger.append(step_record(1))
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_ledger(path) == [step_record(0)]
    with Ledger(path) as ledger:
        assert ledger.next_step == 1
        ledger.append(step_record(1))
    assert read_ledger(path) == [step_record(0), step_record(1)]


def test_a_tail_of_zeros_is_cut_off(tmp_path: Path, step_record: Make) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append(step_record(0))
        with path.open("ab") as file:  # what a power cut can leave behind
            file.write(b"\0" * 100)
        assert read_ledger(path) == [step_record(0)]
        ledger.append(step_record(1))
    assert read_ledger(path) == [step_record(0), step_record(1)]


@pytest.mark.parametrize("line", [b"{]\n", b"3\n", b"\n"])
def test_a_damaged_middle_is_named(tmp_path: Path, step_record: Make, line: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append(step_record(0))
        ledger.append(step_record(1))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + second)
    with pytest.raises(DataError, match=r"ledger\.jsonl:2: "):
        read_ledger(path)
    with pytest.raises(DataError, match=r"ledger\.jsonl:2: "):
        Ledger(path)


@pytest.mark.parametrize(
    "change", [{"loss": None}, {"step": "1"}, {"step": True}, {"samples": [1]}, {"samples": [0, 1.5]}, {"digest": 3}]
)
def test_a_record_of_another_kind_is_named(tmp_path: Path, step_record: Make, change: dict[str, object]) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps({**record_to_json(step_record(0)), **change}) + "\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl:1: not a ledger record"):
        read_ledger(path)


def test_a_record_that_lacks_a_field_is_named(tmp_path: Path, step_record: Make) -> None:
    given = record_to_json(step_record(0))
    del given["digest"]
    with pytest.raises(DataError, match="here: the record lacks 'digest'"):
        record_from_json(given, "here")


def test_a_ledger_with_a_gap_is_not_opened(tmp_path: Path, step_record: Make) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(record_to_json(step_record(1))) + "\n")
    with pytest.raises(DataError, match="step 1 where step 0 belongs"):
        Ledger(path)


def test_two_writers_see_each_other(tmp_path: Path, step_record: Make) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as old, Ledger(path) as new:
        assert old.append(step_record(0))
        assert new.append(step_record(1))
        assert not old.append(step_record(1))
        assert old.append(step_record(2))
        assert new.append(step_record(3))
    assert [r.step for r in read_ledger(path)] == [0, 1, 2, 3]


def _append_all(path: Path, records: list[StepRecord]) -> None:
    with Ledger(path) as ledger:
        for record in records:
            ledger.append(record)


def test_writers_in_several_processes(tmp_path: Path, step_record: Make) -> None:
    records = [step_record(step) for step in range(200)]
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_all, args=(tmp_path / "ledger.jsonl", records)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    assert read_ledger(tmp_path / "ledger.jsonl") == records


def test_an_append_waits_for_the_lock(tmp_path: Path, step_record: Make) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger, path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writer = threading.Thread(target=ledger.append, args=(step_record(0),))
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        assert read_ledger(path) == []
        fcntl.flock(other, fcntl.LOCK_UN)
        writer.join(10)
        assert read_ledger(path) == [step_record(0)]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, step_record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    write = os.write
    with Ledger(path) as ledger:
        ledger.append(step_record(0))
        monkeypatch.setattr("os.write", lambda fd, data: write(fd, data[:20]))
        with pytest.raises(HostError, match="the disk is full"):
            ledger.append(step_record(1))
        monkeypatch.undo()
        assert read_ledger(path) == [step_record(0)]
        assert path.read_bytes().endswith(b"\n")
        assert ledger.append(step_record(1))


def test_events_keep_their_fields_and_durable_ones_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.append("plan", time=1.0, step=3, generation=2, members=[0, 1])
        assert not synced
        log.append("fault_injected", time=2.0, step=3, generation=2, fault="stop")
        assert synced
        with pytest.raises(InternalError, match="unknown event kind 'party'"):
            log.append("party", time=2.0, step=3, generation=2)
    events = read_events(tmp_path / "events.jsonl")
    assert events[0] == {"time": 1.0, "kind": "plan", "step": 3, "generation": 2, "members": [0, 1]}
    assert [e["kind"] for e in events] == ["plan", "fault_injected"]


def test_no_file_is_no_records(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "ledger.jsonl") == []
    assert Tail(tmp_path / "ledger.jsonl").read() == []


def test_a_tail_gets_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert tail.read() == [{"a": 1}]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b'2}\n{"a"')
    assert tail.read() == [{"a": 2}]
    with path.open("r+b") as file:  # the torn tail is cut off, another line comes
        file.truncate(18)
        file.seek(18)
        file.write(b'{"a": 3}\n')
    assert tail.read() == [{"a": 3}]


@given(st.lists(st.integers(0, 30), max_size=20))
def test_a_tail_gets_every_line_however_they_come(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    path = tmp_path_factory.mktemp("tail") / "events.jsonl"
    tail, count, got = Tail(path), 0, []
    for size in sizes:
        with path.open("a") as file:
            file.writelines(f'{{"n": {n}}}\n' for n in range(count, count + size))
        count += size
        got += [line["n"] for line in tail.read()]
    assert got == list(range(count))


def test_a_tail_waits_at_a_line_that_may_be_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n\0\0\n')
    tail = Tail(path)
    assert tail.read() == [{"a": 1}]
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    assert tail.read() == [{"a": 2}]
