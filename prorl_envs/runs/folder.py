"""Folder of a run: results are appended as they arrive, so that an interrupted run can be resumed.

runs/20261125-120000-bash/
    run.json         description of the run: environment, model, time, version
    groups.jsonl     the requested groups, with the rows of their tasks
    results.jsonl    one finished sample per line, in the order of arrival
    failed.jsonl     failed samples that were run again (`--retry-failed`)
    summary.json     statistics of the results (see `statistics.py`)
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import Summary, summarise, summary_of
from prorl_envs.rollout.api.types import GroupRequest, JobState, Result, job_id
from prorl_envs.rollout.client.result_files import GROUPS, RESULTS, lines_of, ready, write_results

RUN, FAILED, SUMMARY = "run.json", "failed.jsonl", "summary.json"
#: Seconds to wait for the lock of a folder, which `viewer/runs.py` holds for some microseconds.
_LOCK_S = 0.2


class RunDescription(BaseModel):
    """Description of a run.

    Args:
        name: first part of the ids of the run's groups.
        environment: environment as named on the command line.
        model: name of the model; "" if only the service knows it.
        started: time of the start in ISO 8601, UTC.
        version: version of prorl-envs.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    environment: str
    model: str = ""
    started: str
    version: str


@dataclass(frozen=True, slots=True)
class Submission:
    """Group to submit for some samples of a run's group.

    Args:
        request: the request to submit.
        group_id: id of the run's group.
        samples: for each sample of the request, its index in the run's group.
    """

    request: GroupRequest
    group_id: str
    samples: Sequence[int]

    def relabelled(self, result: Result) -> Result:
        """Return a result of the request as a result of the run's group."""
        sample = self.samples[result.sample]
        ids = {"group_id": self.group_id, "sample": sample, "job_id": job_id(self.group_id, sample)}
        return result.model_copy(update=ids)


def check_new(path: Path) -> None:
    """Check that a run can start in a folder, and create the folder.

    Raises:
        InputError: the folder has results, or cannot be written.
    """
    results = ready(path / RESULTS)
    if (path / RUN).exists() or (results.exists() and results.stat().st_size):
        raise InputError(
            f"{path} has the results of a run already",
            hint="--resume finishes that run; --out names another folder",
        )


@dataclass(slots=True)
class RunFolder:
    """Folder of a run, which is locked against other runs until it is closed. A context manager.

    Args:
        path: path of the folder.
        description: description of the run.
        groups: the groups that the command requests.
        summaries: summary of each result in the folder, by group id and sample.
    """

    path: Path
    description: RunDescription
    groups: Sequence[GroupRequest]
    summaries: dict[tuple[str, int], Summary] = field(default_factory=dict)
    _fd: int = -1

    @property
    def results_path(self) -> Path:
        return self.path / RESULTS

    @classmethod
    def create(cls, path: Path, description: RunDescription, groups: Sequence[GroupRequest]) -> Self:
        """Start a run in an empty or new folder.

        Raises:
            InputError: the folder has results, or cannot be written.
        """
        check_new(path)
        folder = cls(path, description, groups)
        folder._lock()
        try:
            check_new(path)  # again, since another run may have started before the lock
            _replace(path / RUN, description.model_dump_json(indent=2))
            write_results(path / GROUPS, groups)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def resume(cls, path: Path, groups: Sequence[GroupRequest], model: str, *, retry_failed: bool) -> Self:
        """Continue the run of a folder.

        Args:
            path: path of the folder.
            groups: the groups that the command requests, with ids that start with the run's name. There may
                be more tasks or more samples than before.
            model: name of the model; "" if unknown.
            retry_failed: move failed samples to `failed.jsonl`, so that they are run again.

        Raises:
            InputError: there is no run, the request differs otherwise, or the folder cannot be written.
        """
        description = read_description(path)
        if model and description.model and model != description.model:
            raise InputError(
                f"{path} was run with the model {description.model}, not {model}",
                hint="--out names another folder",
            )
        before = {group.id: group for group in run_groups(path)}
        for group in groups:
            _check_same(before.get(group.id), group, path)
        folder = cls(path, description, groups)
        folder._lock()
        try:
            folder._repair()
            folder._read_results(retry_failed=retry_failed)
            merged = {**before, **{group.id: group for group in groups}}
            write_results(path / GROUPS, merged.values())
        except BaseException:
            folder.close()
            raise
        return folder

    def missing(self) -> list[tuple[GroupRequest, list[int]]]:
        """Return the run's groups that lack samples, each with the indices of these samples."""
        missing = (
            (group, [n for n in range(group.samples) if (group.id, n) not in self.summaries])
            for group in self.groups
        )
        return [(group, samples) for group, samples in missing if samples]

    def append(self, result: Result) -> bool:
        """Write a result, unless its sample was cancelled or already has a result. Return True if it was
        written. A written result survives the exit of this process.

        Raises:
            InputError: the result cannot be written. The file is unchanged.
        """
        key = (result.group_id, result.sample)
        if result.state is JobState.CANCELLED or key in self.summaries:
            return False
        line = result.model_dump_json().encode() + b"\n"
        size = os.fstat(self._fd).st_size
        try:
            remaining = memoryview(line)
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise InputError(
                f"cannot write {self.results_path}: {error.strerror}",
                hint="free disk space; --resume continues the run",
            ) from error
        self.summaries[key] = summarise(result)
        return True

    def save_summary(self, summary: BaseModel) -> None:
        """Write `summary.json`, in place of an earlier summary."""
        _replace(self.path / SUMMARY, summary.model_dump_json(indent=2))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            self._fd = os.open(self.results_path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(
                f"cannot write {self.results_path}: {error.strerror}", hint="choose another folder: --out"
            ) from error
        if not _lock_in_time(self._fd):
            self.close()
            raise InputError(
                f"another process writes to {self.path}", hint="wait, or choose another folder with --out"
            )

    def _repair(self) -> None:
        """Remove an incomplete last line, which a killed process left."""
        size = os.fstat(self._fd).st_size
        end = size
        while end:
            start = max(0, end - (1 << 20))
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)

    def _read_results(self, *, retry_failed: bool) -> None:
        kept, failed = [], []
        with self.results_path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                try:
                    summary = summary_of(line)
                except InputError as error:
                    raise InputError(
                        f"{self.results_path}:{number}: {error.message}", hint="correct or remove the line"
                    ) from error
                if retry_failed and summary.failure is not None:
                    failed.append(line)
                else:
                    kept.append(line) if retry_failed else None
                    self.summaries[summary.group_id, summary.sample] = summary
        if failed:
            self._move_failed(kept, failed)

    def _move_failed(self, kept: Sequence[bytes], failed: Sequence[bytes]) -> None:
        with (self.path / FAILED).open("ab") as lines:
            lines.writelines(failed)
        partial = self.results_path.with_suffix(".partial")
        partial.write_bytes(b"".join(kept))
        partial.replace(self.results_path)
        self.close()  # the lock was on the replaced file
        self._lock()


def submissions(folder: RunFolder, session: str = "") -> list[Submission]:
    """Return the submissions for the missing samples of a run.

    Args:
        folder: folder of the run.
        session: name of the session of a resumed run. The missing samples of a group are then submitted under
            a new id, since the service may know the group already. With a sampling seed each sample is
            submitted alone, since the service adds its index to the seed. "" submits the groups unchanged.
    """
    needed = []
    for group, missing in folder.missing():
        if not session:
            needed.append(Submission(group, group.id, missing))
        elif group.sampling.seed is None:
            request = group.model_copy(update={"id": f"{group.id}/{session}", "samples": len(missing)})
            needed.append(Submission(request, group.id, missing))
        else:
            needed += [_seeded(group, session, sample) for sample in missing]
    return needed


def _seeded(group: GroupRequest, session: str, sample: int) -> Submission:
    assert group.sampling.seed is not None
    sampling = group.sampling.model_copy(update={"seed": group.sampling.seed + sample})
    changes = {"id": f"{group.id}/{session}.{sample}", "samples": 1, "sampling": sampling}
    return Submission(group.model_copy(update=changes), group.id, [sample])


def read_description(path: Path) -> RunDescription:
    """Read the description of the run in a folder.

    Raises:
        InputError: the folder contains no run.
    """
    try:
        return RunDescription.model_validate_json((path / RUN).read_bytes())
    except OSError as error:
        hint = "omit --resume to start a run there" if not path.exists() else "name the folder of a run"
        raise InputError(f"{path} holds no run: {RUN}: {error.strerror}", hint=hint) from error
    except ValidationError as error:
        raise InputError(f"{path / RUN}: {error.errors()[0]['msg']}", hint="the file was changed") from error


def run_groups(path: Path) -> list[GroupRequest]:
    """Read the groups that a run requested.

    Raises:
        InputError: the groups cannot be read.
    """
    groups = []
    for where, group in lines_of(path / GROUPS, GroupRequest.model_validate_json):
        if isinstance(group, str):
            raise InputError(f"{where}: not a group: {group}", hint="the file was changed")
        groups.append(group)
    return groups


def _check_same(before: GroupRequest | None, now: GroupRequest, path: Path) -> None:
    """Check that the request for a group has not changed, except its number of samples.

    Raises:
        InputError: the request has changed.
    """
    if before is None:
        return
    old, new = (group.model_dump(mode="json", exclude={"samples"}) for group in (before, now))
    changed = [name for name in old if old[name] != new[name]]
    if changed:
        raise InputError(
            f"{path} was run with another {changed[0]} for the task {now.id}: "
            f"{_short(old[changed[0]])}, not {_short(new[changed[0]])}",
            hint="use the options of that run, or name another folder with --out",
        )


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _lock_in_time(descriptor: int) -> bool:
    """Lock a file. Return False if another process holds the lock for longer than `_LOCK_S`."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        except OSError:
            # Some network file systems have no locks. On these, two runs in one folder are not detected.
            return True
        else:
            return True
        time.sleep(_LOCK_S / 10)


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
