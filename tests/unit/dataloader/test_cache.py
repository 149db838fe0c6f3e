import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dataloader.cache import built_once, default_cache_dir
from dataloader.errors import DataError, HostError


def write_whole(directory: Path) -> None:
    (directory / "part").write_text("whole")


def check_whole(directory: Path) -> None:
    if not (directory / "part").is_file() or (directory / "part").read_text() != "whole":
        raise DataError("damaged")


def no_wait() -> None:
    raise AssertionError("nobody else is building")


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_an_entry_is_built_once(tmp_path):
    calls = []

    def build(directory: Path) -> None:
        calls.append(directory)
        write_whole(directory)

    for _ in range(3):
        assert built_once(tmp_path / "new" / "cache", "entry", build, check_whole, no_wait).name == "entry"
    assert len(calls) == 1
    assert visible(tmp_path / "new" / "cache") == ["entry", "entry.lock"]


def test_a_damaged_entry_is_built_again(tmp_path):
    entry = built_once(tmp_path, "entry", write_whole, check_whole, no_wait)
    (entry / "part").write_text("wh")
    (entry / "other").write_text("left over")
    assert built_once(tmp_path, "entry", write_whole, check_whole, no_wait) == entry
    assert (entry / "part").read_text() == "whole"
    assert visible(entry) == ["part"]
    assert visible(tmp_path) == ["entry", "entry.lock"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError("no text")])
def test_a_build_that_fails_leaves_nothing(tmp_path, error):
    def build(directory: Path) -> None:
        write_whole(directory)
        raise error

    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        built_once(tmp_path, "entry", build, check_whole, no_wait)
    assert visible(tmp_path) == ["entry.lock"]
    built_once(tmp_path, "entry", write_whole, check_whole, no_wait)


BUILD_AND_WAIT = """
import sys, time
from pathlib import Path
from dataloader.cache import built_once
def build(directory):
    (directory / "part").write_text("wh")
    print("half", flush=True)
    sys.stdin.readline()
    (directory / "part").write_text("whole")
    print("built", flush=True)
built_once(Path(sys.argv[1]), "entry", build, lambda directory: None, lambda: None)
"""


def start_builder(cache: Path) -> subprocess.Popen[str]:
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILD_AND_WAIT, cache], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert builder.stdout is not None
    assert builder.stdout.readline() == "half\n"
    return builder


def test_a_killed_builder_leaves_no_half_entry_and_no_lock(tmp_path):
    with start_builder(tmp_path) as builder:
        assert not (tmp_path / "entry").exists()
        builder.send_signal(signal.SIGKILL)
        builder.wait(timeout=30)
    assert len(visible(tmp_path)) == 2  # the lock and what was begun
    entry = built_once(tmp_path, "entry", write_whole, check_whole, no_wait)
    check_whole(entry)
    assert visible(tmp_path) == ["entry", "entry.lock"]


def test_the_second_job_waits_for_the_first_and_takes_what_it_built(tmp_path):
    waiting, got = threading.Event(), []

    def must_not_build(directory: Path) -> None:
        raise AssertionError("built twice")

    def second() -> None:
        got.append(built_once(tmp_path, "entry", must_not_build, check_whole, waiting.set))

    with start_builder(tmp_path) as builder:
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(30)
        assert not got
        builder.communicate("go\n", timeout=30)
        thread.join(30)
    check_whole(got[0])
    assert visible(tmp_path) == ["entry", "entry.lock"]


def test_the_second_job_builds_if_the_first_is_killed(tmp_path):
    waiting, got = threading.Event(), []

    def second() -> None:
        got.append(built_once(tmp_path, "entry", write_whole, check_whole, waiting.set))

    with start_builder(tmp_path) as builder:
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(30)
        builder.kill()
        thread.join(30)
    check_whole(got[0])
    assert visible(tmp_path) == ["entry", "entry.lock"]


def test_many_threads_build_one_entry(tmp_path):
    built = []

    def build(directory: Path) -> None:
        built.append(directory)
        write_whole(directory)

    def job() -> None:
        check_whole(built_once(tmp_path, "entry", build, check_whole, lambda: None))

    threads = [threading.Thread(target=job) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(built) == 1


def test_an_entry_that_another_host_finished_first_is_taken(tmp_path):
    """Where the file system shares no locks, both build; the later one is thrown away, as the first may be in use."""

    def build(directory: Path) -> None:
        write_whole(directory)
        (tmp_path / "entry").mkdir()
        write_whole(tmp_path / "entry")
        (tmp_path / "entry" / "by the other host").touch()

    entry = built_once(tmp_path, "entry", build, check_whole, no_wait)
    assert visible(entry) == ["by the other host", "part"]
    assert visible(tmp_path) == ["entry", "entry.lock"]


def test_a_cache_that_cant_be_written_is_named_with_the_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match=r"file/cache: .*; set data\.cache_dir to a directory"):
        built_once(tmp_path / "file" / "cache", "entry", write_whole, check_whole, no_wait)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    def build(directory: Path) -> None:
        (directory / "part").write_text("wh")
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    with pytest.raises(HostError, match=r"No space left on device; set data\.cache_dir"):
        built_once(tmp_path, "entry", build, check_whole, no_wait)
    assert visible(tmp_path) == ["entry.lock"]


def test_a_display_that_went_away_is_not_blamed_on_the_cache(tmp_path):
    def build(directory: Path) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        built_once(tmp_path, "entry", build, check_whole, no_wait)


def test_the_default_place_follows_the_users_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/somebody")
    assert default_cache_dir() == Path("/var/cache/somebody/everstep")
    for useless in ("relative/cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert default_cache_dir() == Path("/home/somebody/.cache/everstep")
    assert os.environ["HOME"] == "/home/somebody"
