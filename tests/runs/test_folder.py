"""The folder of a run: appended results, resumption, and errors that prevent the loss of results."""

import fcntl
import os
import resource
import signal
from pathlib import Path

import pytest

from prorl_envs.errors import FailureKind, InputError
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import Failure, GroupRequest, JobState, Result, Stage
from prorl_envs.rollout.client.result_files import read_results
from prorl_envs.runs.folder import RunDescription, RunFolder, run_groups, submissions

DESCRIPTION = RunDescription(
    name="run", environment="bash", model="m", started="2026-01-01T00:00:00+00:00", version="1"
)


def group(name: str = "a", samples: int = 3, **changes: object) -> GroupRequest:
    fields: dict[str, object] = {"id": f"run/{name}", "environment": "bash", "task": {"id": name}}
    return GroupRequest.model_validate(fields | {"samples": samples} | changes)


def result(sample: int, task: str = "a", state: JobState = JobState.DONE) -> Result:
    failure = Failure(kind=FailureKind.MODEL, stage=Stage.RUN, message="no answer")
    done = state is JobState.DONE
    return Result(
        job_id=f"run/{task}/{sample}",
        group_id=f"run/{task}",
        sample=sample,
        environment="bash",
        task_id=task,
        state=state,
        reward=1.0 if done else None,
        mask_sample=not done,
        stop_reason=None,
        failure=None if done else failure,
    )


def stored(path: Path) -> list[str]:
    return [one.job_id for one in read_results(path)]


def resume(path: Path, *groups: GroupRequest, model: str = "m", retry_failed: bool = False) -> RunFolder:
    return RunFolder.resume(path, groups or [group()], model, retry_failed=retry_failed)


def test_a_result_is_in_the_file_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "r", DESCRIPTION, [group()]) as folder:
        assert folder.append(result(1)) and stored(tmp_path / "r") == ["run/a/1"]
        assert not folder.append(result(1)), "a second result of a sample is dropped"
        assert not folder.append(result(0, state=JobState.CANCELLED)), "a cancelled sample is run again"
        assert folder.append(result(2)) and stored(tmp_path / "r") == ["run/a/1", "run/a/2"]
        assert folder.missing() == [(group(), [0])]


def test_a_folder_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "groups.partial").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"cannot write .*groups.jsonl: No space left on device"):
        RunFolder.create(tmp_path, DESCRIPTION, [group()])


def test_a_folder_with_results_is_refused(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, DESCRIPTION, [group()]) as folder:
        folder.append(result(0))
    with pytest.raises(InputError, match="has the results of a run") as caught:
        RunFolder.create(tmp_path, DESCRIPTION, [group()])
    assert "--resume" in caught.value.hint and stored(tmp_path) == ["run/a/0"]


def test_results_of_an_older_version_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="has the results"):
        RunFolder.create(tmp_path, DESCRIPTION, [group()])


def test_two_processes_cannot_write_to_one_folder(tmp_path: Path) -> None:
    with (
        RunFolder.create(tmp_path, DESCRIPTION, [group()]),
        pytest.raises(InputError, match="another process"),
    ):
        resume(tmp_path)
    resume(tmp_path).close()


def test_a_viewer_that_looks_at_the_lock_does_not_refuse_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunFolder.create(tmp_path, DESCRIPTION, [group()]).close()
    with (tmp_path / "results.jsonl").open("rb") as viewer:
        fcntl.flock(viewer.fileno(), fcntl.LOCK_SH)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(viewer.fileno(), fcntl.LOCK_UN))
        resume(tmp_path).close()


def test_a_resumed_run_misses_the_samples_without_a_result(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, DESCRIPTION, [group(), group("b")]) as folder:
        folder.append(result(1))
        folder.append(result(0, "b", JobState.FAILED))
    with resume(tmp_path, group(), group("b"), group("c", 1)) as folder:
        missing = [(one.id, samples) for one, samples in folder.missing()]
        assert missing == [("run/a", [0, 2]), ("run/b", [1, 2]), ("run/c", [0])]
    assert [one.id for one in run_groups(tmp_path)] == ["run/a", "run/b", "run/c"]


def test_a_line_cut_by_a_kill_is_dropped_and_its_sample_run_again(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, DESCRIPTION, [group()]) as folder:
        folder.append(result(0))
        folder.append(result(1))
    path = tmp_path / "results.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    with resume(tmp_path) as folder:
        assert folder.missing() == [(group(), [1, 2])]
        folder.append(result(1))
    assert stored(tmp_path) == ["run/a/0", "run/a/1"]


def test_a_damaged_line_is_named_and_kept(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, DESCRIPTION, [group()]) as folder:
        folder.append(result(0))
    path = tmp_path / "results.jsonl"
    content = b"not a result\n" + path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"results.jsonl:1: not a rollout result"):
        resume(tmp_path)
    assert path.read_bytes() == content


def test_failed_samples_are_run_again_if_requested(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, DESCRIPTION, [group()]) as folder:
        folder.append(result(0, state=JobState.FAILED))
        folder.append(result(1))
    with resume(tmp_path) as folder:
        assert folder.missing() == [(group(), [2])]
    with resume(tmp_path, retry_failed=True) as folder:
        assert folder.missing() == [(group(), [0, 2])]
        folder.append(result(0))
    assert stored(tmp_path) == ["run/a/1", "run/a/0"]
    assert stored(tmp_path / "failed.jsonl") == ["run/a/0"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (group(sampling=Sampling(temperature=0.5)), "another sampling"),
        (group(task={"id": "a", "more": 1}), "another task"),
        (group(limits={"max_turns": 3}), "another limits"),
    ],
)
def test_samples_of_different_settings_are_not_mixed(
    tmp_path: Path, changed: GroupRequest, words: str
) -> None:
    RunFolder.create(tmp_path, DESCRIPTION, [group()]).close()
    with pytest.raises(InputError, match=words):
        resume(tmp_path, changed)


def test_samples_of_another_model_are_not_mixed(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, DESCRIPTION, [group()]).close()
    with pytest.raises(InputError, match="with the model m, not other"):
        resume(tmp_path, model="other")


def test_more_samples_extend_a_run(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, DESCRIPTION, [group(samples=1)]) as folder:
        folder.append(result(0))
    with resume(tmp_path, group(samples=3)) as folder:
        assert [samples for _, samples in folder.missing()] == [[1, 2]]


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        resume(tmp_path / "nothing")


def test_a_full_disk_keeps_earlier_results(tmp_path: Path) -> None:
    """A limit on the file's size fails a write in the middle of a line, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with RunFolder.create(tmp_path, DESCRIPTION, [group()]) as folder:
        folder.append(result(0))
        size = (tmp_path / "results.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        try:
            with pytest.raises(InputError, match="cannot write"):
                folder.append(result(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert (tmp_path / "results.jsonl").stat().st_size == size
        assert folder.append(result(1))
    assert stored(tmp_path) == ["run/a/0", "run/a/1"]


def test_missing_samples_keep_their_index(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, DESCRIPTION, [group()]) as folder:
        assert [one.request for one in submissions(folder)] == [group()]
        folder.append(result(1))
        (one,) = submissions(folder, "r1")
        assert (one.request.id, one.request.samples) == ("run/a/r1", 2)
        again = one.relabelled(result(1).model_copy(update={"group_id": "run/a/r1", "job_id": "run/a/r1/1"}))
        assert (again.job_id, again.group_id, again.sample) == ("run/a/2", "run/a", 2)


def test_missing_samples_keep_their_seed(tmp_path: Path) -> None:
    """The service adds a sample's index to the seed: sample 2 of seed 5 is sampled with seed 7."""
    seeded = group(sampling=Sampling(seed=5))
    with RunFolder.create(tmp_path, DESCRIPTION, [seeded]) as folder:
        folder.append(result(1))
        found = [
            (one.request.sampling.seed, one.request.samples, one.samples) for one in submissions(folder, "r1")
        ]
    assert found == [(5, 1, [0]), (7, 1, [2])]
