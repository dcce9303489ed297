"""Verifier: runs a step's tests in a sandbox of its own, on the files that the agent left.

The agent's sandbox has ended by then: no process of the agent runs, and its files are a layer over the image.
What the agent left in `/tests` and `/logs/verifier` is removed first.
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
from pathlib import Path, PurePosixPath

from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import sandbox_session
from prorl_envs.env.task_files import content_of
from prorl_envs.envs.terminal.harbor import ARTIFACTS
from prorl_envs.envs.terminal.images import TaskImage, task_image, write_files
from prorl_envs.envs.terminal.machines import machine_spec
from prorl_envs.envs.terminal.options import TerminalOptions
from prorl_envs.envs.terminal.planted import AccessibleLayer
from prorl_envs.envs.terminal.task import Machine, Step, TerminalTask
from prorl_envs.errors import GraderError, SandboxError, ToolError, TransferRefused
from prorl_envs.images.threads import in_thread
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.layered import SUFFIX
from prorl_envs.tools.pool.sandbox_session import SandboxSession

#: Directories of the verifier, which hold nothing of the agent's; and that of the solution.
TESTS, LOGS, SOLUTION = "/tests", "/logs/verifier", "/solution"
_OWN = (TESTS, LOGS)
#: Rewards by name, and one number.
_REWARDS, _REWARD = f"{LOGS}/reward.json", f"{LOGS}/reward.txt"
_REWARD_BYTES = 64 * 1024
#: Most rewards of one file, and characters of a name.
_REWARDS_LIMIT, _NAME_LIMIT = 100, 200
_COPY_S = 300.0
#: Seconds of a verifier whose task sets none.
_VERIFIER_S = 600.0
_TAIL = 4000
_SUMMARY = re.compile(r"^=+ short test summary info =+$", re.MULTILINE)
_STATUS = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of one run of the tests.

    Args:
        rewards: by name; empty if there is a problem. A single number has the name `reward`.
        problem: why there are no rewards, in a sentence.
        exit_code: of the tests; None if they did not finish.
        output: the end of their output. Untrusted.
    """

    rewards: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    exit_code: int | None = None
    output: str = ""

    @property
    def reward(self) -> float:
        """The number named `reward`, else the mean of all; 0 without any."""
        if "reward" in self.rewards or not self.rewards:
            return self.rewards.get("reward", 0.0)
        return sum(self.rewards.values()) / len(self.rewards)

    def reaches(self, least: Mapping[str, float]) -> bool:
        """Return True if each of these rewards is as high at least."""
        return all(self.rewards.get(name, -math.inf) >= value for name, value in least.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Verifier of a step.

    Args:
        image: the agent's.
        scratch: private directory on the file system of the sandboxes.
    """

    node: Node
    options: TerminalOptions
    task: TerminalTask
    step: Step
    image: TaskImage
    scratch: Path

    async def verify(self, layers: Sequence[Path]) -> Verdict:
        """Run the tests on the image with these layers over it, the lowest first.

        Raises:
            SandboxError, ToolError, EnvironmentFault: our infrastructure failed, or the verifier's image
                cannot be built.
        """
        files = await in_thread(self._write_files)
        left = await in_thread(self._image_with, layers, files)
        machine = self.step.verifier_machine
        if machine is None:
            spec = self._spec(left, self.task.machine, files)
            async with sandbox_session(self.node, spec) as place:
                return await self._run(place)
        own = await task_image(
            self.node, self.task.files, machine, timeout_factor=self.options.timeout_factor
        )
        async with sandbox_session(self.node, self._spec(own, machine, files)) as place:
            await self._copy_artifacts(left, files, place)
            return await self._run(place)

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
                for own in _OWN:
                    remove_entry(view, layer, own)
        return self.image.with_layers(layers, folder / f"left{SUFFIX}")

    def _spec(self, image: TaskImage, machine: Machine, files: Path) -> SandboxSpec:
        limits = self.node.limits
        spec = machine_spec(image, machine, self.step.verifier, self.options, limits)
        mounts = [Mount(source=files / "logs", target=LOGS, overlay=True)]
        if self.step.tests:
            mounts.append(Mount(source=files / "tests", target=TESTS, overlay=True))
        return replace(spec, mounts=(*spec.mounts, *mounts))

    async def _run(self, place: SandboxSession) -> Verdict:
        limit_s = (self.step.verifier.timeout_s or _VERIFIER_S) * self.options.timeout_factor
        script = f"{TESTS}/{self.step.test_script}"
        try:
            done = await place.tools.run(["/bin/sh", "-c", script], timeout_s=limit_s)
        except OSError as error:  # the agent removed the shell, or the working directory
            return Verdict(problem=f"the tests cannot be started: {error.strerror}")
        except (SandboxError, ToolError) as error:
            # The agent's programs may run in the tests, and can exceed every limit of the sandbox.
            return Verdict(problem=f"the verifier's sandbox was lost: {error.message}")
        output = done.output.decode(errors="replace")
        try:
            if done.timed_out:
                raise _NoReward(f"the tests did not finish in {limit_s:g} s")
            rewards = _summary(output) if self.step.result == "pytest" else await _rewards(place)
        except _NoReward as error:
            return Verdict(problem=str(error), exit_code=done.exit_code, output=output[-_TAIL:])
        verdict = Verdict(rewards=rewards, exit_code=done.exit_code, output=output[-_TAIL:])
        if 0 <= verdict.reward <= 1:
            return verdict
        return replace(verdict, rewards={}, problem=f"the reward {verdict.reward:g} is not from 0 to 1")

    async def _copy_artifacts(self, left: TaskImage, folder: Path, target: SandboxSession) -> None:
        """Copy the artifacts out of the agent's files. Harbor, too, leaves out those that do not exist."""
        spec = SandboxSpec(image=left.path, emulate_root=True, workdir="/", limits=self.node.limits)
        copies = folder / "artifacts"
        copies.mkdir()
        sources = {ARTIFACTS: (), **{one.source: one.exclude for one in self.step.artifacts}}
        async with sandbox_session(self.node, spec) as source:
            for number, (path, excluded) in enumerate(sources.items()):
                copy = copies / str(number)
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
                        hint="the verifier's image has something else there",
                    ) from error


class _NoReward(Exception):
    """The tests gave no reward."""


async def _rewards(place: SandboxSession) -> dict[str, float]:
    """Return the rewards as Harbor reads them: `reward` may be in the text beside a JSON report."""
    found = await _read(place, _REWARDS, _parse_json)
    if found is not None and "reward" in found:
        return found
    try:
        single = await _read(place, _REWARD, _parse_text)
    except _NoReward:
        if not found:
            raise
        single = None
    if not found and single is None:
        raise _NoReward(f"the tests wrote neither {_REWARD} nor {_REWARDS}, or no number")
    return {**(found or {}), **(single or {})}


async def _read(
    place: SandboxSession, path: str, parse: Callable[[str], dict[str, float]]
) -> dict[str, float] | None:
    """Return the rewards in a file; None if it does not exist."""
    try:
        data = await place.tools.read(path, limit=_REWARD_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _NoReward(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _REWARD_BYTES:
        raise _NoReward(f"{path} has more than {_REWARD_BYTES} bytes")
    try:
        return parse(data.decode())
    except (ValueError, RecursionError) as error:
        raise _NoReward(f"{path} holds no reward: {str(error)[:200]}") from error


def _parse_json(text: str) -> dict[str, float]:
    found = json.loads(text)
    values = found if isinstance(found, Mapping) else {"reward": found}
    if not 0 < len(values) <= _REWARDS_LIMIT:
        raise ValueError(f"{len(values)} numbers, not 1 to {_REWARDS_LIMIT}")
    # A report may have texts and lists beside its numbers, but no other reward than a number.
    values = {name: value for name, value in values.items() if name == "reward" or _is_number(value)}
    if not all(name.isprintable() and len(name) <= _NAME_LIMIT for name in values):
        raise ValueError(f"a name is not printable, or has more than {_NAME_LIMIT} characters")
    return {str(name): _number(value) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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


def _summary(output: str) -> dict[str, float]:
    """Return 1 if the last summary of pytest names tests, and all of them passed."""
    parts = _SUMMARY.split(output)
    statuses = _STATUS.findall(parts[-1]) if len(parts) > 1 else []
    if not statuses:
        raise _NoReward("the tests printed no summary of pytest (option -rA)")
    return {"reward": float(all(status == "PASSED" for status in statuses))}


def _exclude(copy: Path, patterns: Sequence[str]) -> None:
    """Remove what a pattern matches from a copied tree, which holds no link that leads out of it."""
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
    """Remove an entry of a layer, and any link or file that stands in the place of a directory above it.

    Args:
        view: of the layer.
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
