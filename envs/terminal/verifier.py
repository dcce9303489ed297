"""Verifier: runs a step's tests in a fresh sandbox, on the agent's files.

The agent's sandbox is closed before: no process of the agent runs, and its changed files are a layer over the
image. Files of the agent in `/tests` and `/logs/verifier` are removed first.
"""

import contextlib
import json
import math
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path, PurePosixPath

from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import sandbox_session
from prorl_envs.env.task_files import content_of
from prorl_envs.envs.terminal.harbor import ARTIFACTS
from prorl_envs.envs.terminal.images import TaskImage, task_image, write_files
from prorl_envs.envs.terminal.machines import machine_spec, shell_command
from prorl_envs.envs.terminal.options import TerminalOptions
from prorl_envs.envs.terminal.planted import AccessibleLayer
from prorl_envs.envs.terminal.services import AGENT, TaskServices
from prorl_envs.envs.terminal.task import Machine, Step, TerminalTask
from prorl_envs.errors import GraderError, SandboxError, ToolError, TransferRefused
from prorl_envs.images.threads import in_thread
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.layered import SUFFIX
from prorl_envs.tools.pool.sandbox_session import SandboxSession

#: Directories of the verifier, which contain no files of the agent; and directory of the solution.
TESTS, LOGS, SOLUTION = "/tests", "/logs/verifier", "/solution"
#: Files with the rewards: one with rewards by name, one with a single number.
_REWARDS, _REWARD = f"{LOGS}/reward.json", f"{LOGS}/reward.txt"
_REWARD_BYTES = 64 * 1024
#: Maximum rewards of one file, and maximum characters of a reward's name.
_REWARDS_LIMIT, _NAME_LIMIT = 100, 200
_COPY_S = 300.0
#: Timeout of the tests in seconds, if the task sets none.
_VERIFIER_S = 600.0
_TAIL = 4000
#: The lines with which pytest starts a session, starts its summary, and ends it.
_MARK = re.compile(
    r"^=+ (?:(?P<start>test session starts)|(?P<summary>short test summary info)"
    r"|.* in [\d.]+s(?: \([\w:, ]*\))?) =+$",
    re.MULTILINE,
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m|\r")
_STATUS = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\b", re.MULTILINE)
#: A failed sub-test, whose test may have passed; and the number of failures: some summaries omit sub-tests.
_FAILED = re.compile(
    r"^(?:[\[(].* )?SUBFAIL(?:ED)?(?=[\s\[(])|^=+ .*\b[1-9]\d{0,5} (?:failed|errors?)\b", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of one run of the tests.

    Args:
        rewards: rewards by name; empty if there is a problem. A single number has the name `reward`.
        problem: reason why there are no rewards; "" if there are.
        exit_code: exit status of the tests; None if they did not finish.
        output: the end of the tests' output. Untrusted.
    """

    rewards: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    exit_code: int | None = None
    output: str = ""

    @property
    def reward(self) -> float:
        """The number named `reward`, else the mean of all numbers; 0 if there are no rewards."""
        if "reward" in self.rewards or not self.rewards:
            return self.rewards.get("reward", 0.0)
        return sum(self.rewards.values()) / len(self.rewards)

    def reaches(self, thresholds: Mapping[str, float]) -> bool:
        """Return true if each reward that has a threshold is at least the threshold."""
        return all(self.rewards.get(name, -math.inf) >= value for name, value in thresholds.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Verifier of a step.

    Args:
        node: starts the sandboxes.
        options: options of the family.
        task, step: the task, and the step that is graded.
        image: image of the agent's sandbox, without the agent's changes.
        scratch: private directory on the file system of the sandboxes.
        services: the services, which the tests reach on the agent's machine.
    """

    node: Node
    options: TerminalOptions
    task: TerminalTask
    step: Step
    image: TaskImage
    scratch: Path
    services: TaskServices

    async def verify(self, layers: Sequence[Path]) -> Verdict:
        """Run the tests on the image with additional layers.

        Args:
            layers: changes of the agent in each finished step, the lowest layer first.

        Raises:
            SandboxError, ToolError, EnvironmentFault: our infrastructure failed, or the verifier's image
                cannot be built.
        """
        files = await in_thread(self._write_files)
        changed = await in_thread(self._image_with, layers, files)
        machine = self.step.verifier_machine
        if machine is None:
            spec = replace(self._spec(changed, self.task.machine, files), hosts=self.services.hosts(AGENT))
            async with sandbox_session(self.node, spec) as session:
                await self.services.join(session)
                return await self._run(session)
        image = await task_image(
            self.node, self.task.files, machine, timeout_factor=self.options.timeout_factor
        )
        async with sandbox_session(self.node, self._spec(image, machine, files)) as session:
            await self._copy_artifacts(changed, files, session)
            return await self._run(session)

    def _write_files(self) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        files = {path: content_of(self.task.files[source]) for path, source in self.step.tests.items()}
        if script := files.get(self.step.test_script):
            files[self.step.test_script] = (script[0], True)
        try:
            write_files(folder / "tests", files)
        except OSError as error:
            raise GraderError(
                f"{self.task.id}: the tests cannot be written: {error.strerror}",
                hint="one of their files has the name of a folder",
            ) from error
        (folder / "logs").mkdir()
        return folder

    def _image_with(self, layers: Sequence[Path], folder: Path) -> TaskImage:
        for layer in layers:
            with AccessibleLayer(layer) as view:
                for path in (TESTS, LOGS):
                    remove_entry(view, layer, path)
        return self.image.with_layers(layers, folder / f"changed{SUFFIX}")

    def _spec(self, image: TaskImage, machine: Machine, files: Path) -> SandboxSpec:
        limits = self.node.limits
        spec = machine_spec(image, machine, self.step.verifier, self.options, limits)
        mounts = [Mount(source=files / "logs", target=LOGS, overlay=True)]
        if self.step.tests:
            mounts.append(Mount(source=files / "tests", target=TESTS, overlay=True))
        return replace(spec, mounts=(*spec.mounts, *mounts))

    async def _run(self, session: SandboxSession) -> Verdict:
        limit_s = (self.step.verifier.timeout_s or _VERIFIER_S) * self.options.timeout_factor
        try:
            done = await session.tools.run(self._command(), timeout_s=limit_s)
        except OSError as error:  # the agent removed the shell, or the working directory
            return Verdict(problem=f"the tests cannot be started: {error.strerror}")
        except (SandboxError, ToolError) as error:
            # Programs of the agent may run in the tests, and exceed a limit of the sandbox.
            return Verdict(problem=f"the verifier's sandbox was lost: {error.message}")
        output = done.output.decode(errors="replace")
        try:
            if done.timed_out:
                raise NoReward(f"the tests did not finish in {limit_s:g} s")
            rewards = summary_reward(output) if self.step.result == "pytest" else await _rewards(session)
        except NoReward as error:
            return Verdict(problem=str(error), exit_code=done.exit_code, output=output[-_TAIL:])
        verdict = Verdict(rewards=rewards, exit_code=done.exit_code, output=output[-_TAIL:])
        if 0 <= verdict.reward <= 1:
            return verdict
        return replace(verdict, rewards={}, problem=f"the reward {verdict.reward:g} is not from 0 to 1")

    def _command(self) -> list[str]:
        """Return the command of the tests: Terminal-Bench runs the script with bash, Harbor directly."""
        script = f"{TESTS}/{self.step.test_script}"
        return shell_command(script) if self.step.result == "pytest" else shell_command("-c", script)

    async def _copy_artifacts(self, changed: TaskImage, folder: Path, target: SandboxSession) -> None:
        """Copy the artifacts from the agent's files to the verifier. As in Harbor, missing ones are skipped.

        Args:
            changed: the image with the agent's changes.
            folder: directory for temporary copies.
            target: the verifier's sandbox.
        """
        spec = SandboxSpec(image=changed.path, emulate_root=True, workdir="/", limits=self.node.limits)
        copies = folder / "artifacts"
        copies.mkdir()
        artifacts = {(item.service, item.source): item.exclude for item in self.step.artifacts}
        sources = {("", ARTIFACTS): (), **artifacts}
        async with sandbox_session(self.node, spec) as own:
            for number, ((service, path), excluded) in enumerate(sources.items()):
                copy = copies / str(number)
                source = self.services.session(service) if service else own
                with contextlib.suppress(OSError, TransferRefused):
                    await source.tools.download(path, copy, timeout_s=_COPY_S, skip_unsupported=True)
                if not copy.exists():
                    continue
                await in_thread(_exclude, copy, excluded)
                try:
                    await target.tools.upload(copy, path, timeout_s=_COPY_S)
                except OSError as error:
                    raise GraderError(
                        f"{self.task.id}: the artifact {path} cannot be copied: {error.strerror}",
                        hint="the verifier's image may have a file of another type at this path",
                    ) from error


class NoReward(Exception):
    """Failure of the tests to give a reward."""


async def _rewards(session: SandboxSession) -> dict[str, float]:
    """Read the rewards. If the JSON file has no `reward`, the text file may add it."""
    found = await _read(session, _REWARDS, _parse_json)
    if found is not None and "reward" in found:
        return found
    try:
        single = await _read(session, _REWARD, _parse_text)
    except NoReward:
        if not found:
            raise
        single = None
    if not found and single is None:
        raise NoReward(f"the tests wrote neither {_REWARD} nor {_REWARDS}, or no number")
    return {**(found or {}), **(single or {})}


async def _read(
    session: SandboxSession, path: str, parse: Callable[[str], dict[str, float]]
) -> dict[str, float] | None:
    """Return the rewards in a file; None if the file does not exist."""
    try:
        data = await session.tools.read(path, limit=_REWARD_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoReward(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _REWARD_BYTES:
        raise NoReward(f"{path} has more than {_REWARD_BYTES} bytes")
    try:
        return parse(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise NoReward(f"{path} contains no reward: {str(error)[:200]}") from error


def _parse_json(text: str) -> dict[str, float]:
    found = json.loads(text)
    values = found if isinstance(found, Mapping) else {"reward": found}
    if not 0 < len(values) <= _REWARDS_LIMIT:
        raise ValueError(f"{len(values)} numbers, not 1 to {_REWARDS_LIMIT}")
    # Texts and lists of a report are ignored, except as `reward`. Harbor refuses a file that contains them.
    values = {
        key: value for key, value in values.items() if key == "reward" or isinstance(value, int | float)
    }
    if not all(name.isprintable() and len(name) <= _NAME_LIMIT for name in values):
        raise ValueError(f"a name is not printable, or has more than {_NAME_LIMIT} characters")
    return {str(name): _number(value) for name, value in values.items()}


def _parse_text(text: str) -> dict[str, float]:
    return {"reward": _number(float(text))}


def _number(value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{str(value)[:50]!r} is not a finite number")
    return number


def summary_reward(output: str) -> dict[str, float]:
    """Return 1 if the summaries of pytest name a passed test, and none that failed.

    As in Terminal-Bench, tests that were skipped or failed as expected do not count, and those that passed
    against expectation failed.

    Raises:
        NoReward: there is no summary, or none names a test.
    """
    summaries = _summaries(_COLOUR.sub("", output))
    statuses = {status for summary in summaries for status in _STATUS.findall(summary)}
    if not statuses:
        raise NoReward("the tests printed no summary of pytest (option -rA)")
    failed = statuses & {"FAILED", "ERROR", "XPASS"} or any(map(_FAILED.search, summaries))
    return {"reward": float("PASSED" in statuses and not failed)}


def _summaries(output: str) -> list[str]:
    """Return the last summary of each session, without sessions that a test started and printed.

    If the starts and ends of sessions do not match, return all summaries.
    """
    sessions, every = list[str](), list[str]()
    depth = 0
    marks = list(_MARK.finditer(output))
    for mark, following in zip_longest(marks, marks[1:]):
        if mark["start"]:
            depth += 1
            if depth == 1:
                sessions.append("")
        elif mark["summary"]:
            every.append(output[mark.end() : following.end() if following else None])
            if depth <= 1:
                sessions[-1:] = every[-1:]
        else:
            depth = max(depth - 1, 0)
    return sessions if any(sessions) else every


def _exclude(copy: Path, patterns: Sequence[str]) -> None:
    """Remove the files that a pattern matches from a copied tree, in which no link leads out of the tree."""
    if not patterns or not copy.is_dir():
        return
    for path in sorted(copy.rglob("*"), reverse=True):
        shown = str(path.relative_to(copy))
        if any(fnmatch(shown, pattern) or fnmatch(path.name, pattern) for pattern in patterns):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def remove_entry(view: AccessibleLayer, layer: Path, path: str) -> None:
    """Remove an entry of a layer; or the link or file that a layer has instead of a parent directory.

    Args:
        view: view of the layer.
        layer: directory of the layer.
        path: absolute path of the entry in the sandbox.
    """
    host = layer
    for part in PurePosixPath(path).parts[1:]:
        host /= part
        try:
            status = view.status(host)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode):
            host.unlink()
            return
    remove_tree(host)
