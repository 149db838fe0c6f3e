import pytest

from dataloader.errors import DataError
from dataloader.stdlib_text import VALID_ONE_IN, library_root, read_library, split_of


def test_the_real_library_is_read_in_order_without_its_tests():
    seen = []
    files = read_library(library_root(), lambda *report: seen.append(report))
    paths = [file.path for file in files]
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(paths)
    assert paths == sorted(set(paths))
    assert seen[-1] == ("read", len(files), len(files))
    folders = {part for path in paths for part in path.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert sum(len(file.content) for file in files) > 5_000_000
    valid = sum(file.split == "valid" for file in files)
    assert len(files) / VALID_ONE_IN / 2 < valid < len(files) / VALID_ONE_IN * 2


def test_the_split_of_a_file_depends_on_its_path_alone():
    expected = {
        "os.py": "train",
        "json/decoder.py": "train",
        "_markupbase.py": "valid",
        "distutils/command/build_py.py": "valid",
        "zoneinfo/_common.py": "valid",
    }
    assert {path: split_of(path) for path in expected} == expected
    assert sum(split_of(f"module_{number}.py") == "valid" for number in range(10_000)) == pytest.approx(500, abs=110)


def test_only_source_text_of_the_library_itself_counts(tmp_path):
    kept = [f"module_{number}.py" for number in range(60)] + ["json/tool.py", "unittest/case.py", "latest/x.py"]
    passed_over = [
        "test/test_os.py",
        "unittest/test/testmock.py",
        "lib2to3/tests/data/bad.py",
        "idlelib/idle_test/test_run.py",
        "site-packages/numpy/core.py",
        "json/__pycache__/tool.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "LICENSE.txt",
        "lib.pyc",
    ]
    for path in kept + passed_over:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    files = read_library(tmp_path)
    assert [file.path for file in files] == sorted(kept)
    assert all(file.text == file.path for file in files)


def test_bytes_that_are_no_utf8_give_the_same_text_everywhere(tmp_path):
    for number in range(60):
        (tmp_path / f"module_{number}.py").write_bytes(b"name = '\xe9'\r\n")
    assert read_library(tmp_path)[0].text == "name = '\ufffd'\r\n"


def test_a_python_without_source_files_is_named(tmp_path):
    with pytest.raises(DataError, match=r"0 source files found.*set data\.path"):
        read_library(tmp_path)
    with pytest.raises(DataError, match=r"python311\.zip: .* isn't a directory here; .*set data\.path"):
        read_library(tmp_path / "python311.zip")
