from pathlib import Path

import pytest

from dataloader.errors import ConfigError
from elastic.config import JobConfig, dump_job, load_job, parse_job, refuse_changes, stored_job
from runtime.config import ModelConfig


def refused(job_file: Path, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(job_file, settings)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_short_job_gets_its_defaults(job_file: Path) -> None:
    job = load_job(job_file)
    assert job.train.shards == 8
    assert job.cluster.workers == 1
    assert job.optimizer.lr == 3e-4  # type: ignore[union-attr]
    assert isinstance(job.model, ModelConfig)
    assert job.run_dir == Path.cwd() / "runs" / "small"
    assert job.shuffle_seed == 7


def test_settings_are_yaml_and_reach_into_sections(job_file: Path) -> None:
    job = load_job(
        job_file, ["train.steps=5", "cluster.nodes=2", "faults=[{at_step: 1, fault: stop}]", "run.dir=there"]
    )
    assert (job.train.steps, job.cluster.nodes, job.faults[0].fault) == (5, 2, "stop")
    assert job.run_dir == Path.cwd() / "there"
    assert job.faults[0].wait is False


def test_data_paths_are_relative_to_the_job_file(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    job = load_job(job_file, ["data={path: tokens, seq_len: 8}"])
    assert job.data.path == job_file.parent / "tokens"
    assert job.run_dir == Path("/runs/small")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.global_batch=30", "train.global_batch: 30, which is not a multiple of"),
        ("train.stepz=3", "train.stepz: unknown key; did you mean train.steps?"),
        ("colour=red", "colour: unknown key; the keys at the top are"),
        ('train.steps="3"', "train.steps: expected a whole number, got '3'"),
        ("train.steps=true", "train.steps: expected a whole number, got true"),
        ("train.steps=3.5", "train.steps: expected a whole number, got 3.5"),
        ("train.steps=0", "train.steps: must be at least 1, got 0"),
        ("train=[1]", "train: expected a mapping of keys to values, got [1]"),
        ("train=", "train: expected a mapping of keys to values, got nothing"),
        ("model.hidden_size=100", "model.hidden_size: 100, which 8 heads don't divide; set it to 96 or 104"),
        ("model.max_seq_len=64", "model.max_seq_len: 64 is less than data.seq_len (128)"),
        ("model.vocab_size=100", "model.vocab_size: 100 is less than data.vocab_size (4096)"),
        ("cluster.nodes=9", "train.logical_ranks: 8 is fewer than the 9 workers of cluster.nodes x"),
        ("cluster.min_workers=2", "cluster.min_workers: 2 is more than the 1 workers that the job starts with"),
        ("optimizer.lr=.nan", "optimizer.lr: expected a finite number"),
        ("schedule.kind=up", "schedule.kind: expected 'warmup_cosine'"),
        ("metrics.port=70000", "metrics.port: must be at most 65535, got 70000"),
        ("run.name=a/b", "run.name: use letters, digits"),
        ("recipe=mine", "recipe: write it as module:Class"),
        ("faults=[{at_step: 1, fault: kill}]", "faults[0].fault: 'kill' is no fault; use one of"),
        ("faults=[{at_step: 40, fault: stop}]", "faults[0].at_step: 40 is not a step of this job"),
        (
            "faults=[{at_step: 1, fault: stop}, {at_step: 1, fault: stop}]",
            "faults[1]: stop at step 1 is there twice",
        ),
        ("data.path=tokens", "data.source and data.path are both given; keep one of them"),
        ("data={path: tokens}", "data.seq_len: missing; set it"),
    ],
)
def test_what_is_wrong_is_said_with_file_key_and_cure(job_file: Path, setting: str, says: str) -> None:
    assert refused(job_file, setting).startswith(f"{job_file}: {says}")


def test_several_findings_are_counted(job_file: Path) -> None:
    assert refused(job_file, "train.steps=a", "train.seed=-1").endswith("(and 1 more)")


@pytest.mark.parametrize("setting", ["train.steps", "=3", "train.=3", "train.steps.more=1"])
def test_a_setting_that_is_none_is_named(job_file: Path, setting: str) -> None:
    assert refused(job_file, setting).startswith("--set ")


def test_a_setting_that_is_not_yaml(job_file: Path) -> None:
    assert refused(job_file, "train.steps=[1").startswith("--set train.steps: ")


def test_two_nodes_may_join_at_once(job_file: Path) -> None:
    two = "faults=[{at_step: 1, fault: add-node}, {at_step: 1, fault: add-node}]"
    assert len(load_job(job_file, [two]).faults) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: {name: [a}\n", ":1: "),
        ("run:\n  name: a\n  name: b\n", ":3: key 'name' is given twice"),
        ("? [1, 2]\n: 3\n", ":1: a key must be a plain word"),
        ("just text\n", ": not a mapping"),
        ("", ": not a mapping"),
        ("run: {name: \x07}\n", ": not YAML"),
    ],
)
def test_broken_yaml_is_named_by_line(job_file: Path, text: str, says: str) -> None:
    job_file.write_text(text)
    assert refused(job_file).startswith(f"{job_file}{says}")


def test_missing_and_unreadable_files(job_file: Path) -> None:
    job_file.write_bytes(b"\xff\xfe\x00")
    assert "not text" in refused(job_file)
    job_file.unlink()
    assert "no such file" in refused(job_file)
    assert "can't be read" in refused(job_file.parent)


def test_a_recipe_gets_its_own_mappings_and_the_folder(job_file: Path) -> None:
    job = load_job(job_file, ["recipe=mine:Recipe", "model={width: 3}", "optimizer={momentum: 0.9, lr: 1}"])
    assert job.model == {"width": 3}
    assert job.optimizer == {"momentum": 0.9, "lr": 1}
    assert job.recipe_dir == job_file.parent


@pytest.mark.parametrize("settings", [(), ("recipe=mine:Recipe", "model={a: {b: [1, 2]}}")])
def test_a_stored_job_is_the_same_job(job_file: Path, settings: tuple[str, ...]) -> None:
    job = load_job(job_file, [*settings, "faults=[{at_step: 3, fault: kill-worker=1, wait: true}]"])
    stored = job_file.parent / "stored.yaml"
    stored.write_text(dump_job(job))
    assert stored_job(stored) == job


def changed(job_file: Path, *settings: str) -> JobConfig:
    return load_job(job_file, settings)


@pytest.mark.parametrize(
    "setting", ["cluster.nodes=4", "metrics.port=9000", "faults=[{at_step: 1, fault: stop}]", "run.dir=elsewhere"]
)
def test_resume_may_change(job_file: Path, setting: str) -> None:
    refuse_changes(load_job(job_file), changed(job_file, setting), Path("run"))


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("train.steps=41", "train.steps"),
        ("optimizer.betas=[0.9, 0.99]", "optimizer.betas"),
        ("checkpoint.keep=3", "checkpoint.keep"),
        ("run.name=other", "run.name"),
        ("data.vocab_size=5000", "data.vocab_size"),
        ("recipe=mine:Recipe", "model"),
    ],
)
def test_resume_may_not_change(job_file: Path, setting: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^run: {key}") as caught:
        refuse_changes(load_job(job_file), changed(job_file, setting), Path("run"))
    allowed = "--resume may change cluster.*, balance.*, guard.*, metrics.*, policy.*, links.* and faults only"
    assert allowed in str(caught.value)


def test_dates_and_plain_exponents_are_what_they_look_like(job_file: Path) -> None:
    assert "got '2020-01-01'" in refused(job_file, "train.steps=2020-01-01")
    assert load_job(job_file, ["optimizer.lr=1e-2"]).optimizer.lr == 0.01  # type: ignore[union-attr]


def test_plain_values_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"^here: "):
        parse_job({"run": {1, 2}}, "here")
