"""Promises about the state of a process inside, for each way to start one: see `conformance/ways.py`."""

import os
import resource
import signal
from collections import Counter
from collections.abc import Iterator

from prorl_envs.conformance.host import SECRET
from prorl_envs.conformance.promise import Promises, same
from prorl_envs.conformance.promises.environment import CUSTOMARY
from prorl_envs.conformance.ways import WAYS, StartWay, State, tool_server
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.sandbox.base import SandboxLimits
from prorl_envs.sandbox.drivers.local import MARK
from prorl_envs.sandbox.limits.enforcement import DEFAULT_LIMITS
from prorl_envs.sandbox.linux.syscall_wrappers import ROOT_CAPABILITIES

promises = Promises("start ways")

_LIMITS = SandboxLimits(open_files=3000, processes=500, file_bytes=1 << 30)
_HOSTNAME = "own-name"
#: Drivers whose processes count together with all others of the service's user, with their limit.
_COUNTED_TOGETHER = {"local": 8192, "apptainer-instance": 8192}
#: Namespaces that a driver does not promise: with setuid Apptainer, there is no user namespace.
_SHARED = {"apptainer-instance": {"user", "cgroup"}}
_NAMESPACES = {"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"}
_OUT_OF_MEMORY = 500
#: Variables by which a driver finds its own processes.
_MARKS = {"local": frozenset({"TMPDIR", MARK})}


def _isolation(world: PromiseContext, found: State) -> Iterator[str]:
    """Yield differences from the isolation that every driver except "local" promises."""
    allowed = ROOT_CAPABILITIES if world.subject.emulate_root else 0
    if any(capabilities & ~allowed for capabilities in found["capabilities"]):
        yield f"it has the capabilities {found['capabilities']}"
    if found["filter"] != 2:
        yield "its system calls are not filtered"
    if found["hostname"] != _HOSTNAME:
        yield f"its host name is {found['hostname']}"
    if found["interfaces"] != ["lo"]:
        yield f"it has the network interfaces {found['interfaces']}"
    promised = _NAMESPACES - _SHARED.get(world.subject.driver, set())
    inside = found.get("namespaces", {})
    shared = [name for name in promised if inside.get(name) == os.readlink(f"/proc/self/ns/{name}")]  # noqa: PTH115
    if shared:
        yield f"it shares the host's namespaces {sorted(shared)}"


def _limits(world: PromiseContext, found: State) -> Iterator[str]:
    processes = _COUNTED_TOGETHER.get(world.subject.driver, _LIMITS.processes)
    highest = {
        "core": 0,
        "files": _LIMITS.open_files,
        "processes": processes,
        "file_size": _LIMITS.file_bytes,
        "queues": 102400,
        "signals": 4096,
    }
    for name, (soft, hard) in found["limits"].items():
        bound = highest[name]
        if bound is not None and (hard == resource.RLIM_INFINITY or not soft <= hard <= bound):
            yield f"its limit of {name} is {soft} of {hard}, promised is {bound}"


def _signals(found: State, expected: frozenset[int]) -> Iterator[str]:
    for kind in ("ignored", "blocked"):
        if others := set(found[kind]) - expected:
            yield f"signals are {kind}: {sorted(others)}"


def _environment(world: PromiseContext, found: State, way: StartWay) -> Iterator[str]:
    given = set(world.spec(python=True).env) | {"GIVEN"} | way.variables
    environment = found["environment" if way.is_fork else "initial_environment"]
    if others := set(environment) - CUSTOMARY - given - _MARKS.get(world.subject.driver, frozenset()):
        yield f"its environment has {sorted(others)}"
    text = str([found["environment"], found.get("initial_environment")])
    if SECRET in text or world.planted.secret in text:
        yield "its environment has the service's secret"


def _descriptors(found: State, promised: Counter[str], others: frozenset[str]) -> Iterator[str]:
    kinds = Counter(found["descriptors"].values())
    extra = {kind: count for kind, count in (kinds - promised).items() if kind not in others}
    if extra:
        yield f"it has descriptors that are not its own: {extra} of {found['descriptors']}"


def _other_differences(world: PromiseContext, found: State) -> Iterator[str]:
    if found["no_new_privileges"] != 1:
        yield "it may gain privileges"
    if found["mask"] != 0o022:
        yield f"its mask for new files is {found['mask']:o}"
    if found["nice"] < DEFAULT_LIMITS.nice:
        yield f"its nice value is {found['nice']}, promised is {DEFAULT_LIMITS.nice}"
    if found.get("out_of_memory", _OUT_OF_MEMORY) < _OUT_OF_MEMORY:
        yield f"its score for the kernel's out-of-memory killer is {found['out_of_memory']}"
    directory = world.spec().workdir
    if world.subject.driver != "local" and found["directory"] != directory:
        yield f"it starts in {found['directory']}, promised is {directory}"


def differences(world: PromiseContext, way: StartWay, found: State) -> Iterator[str]:
    """Yield each difference between the state of a process and the promises about it."""
    if world.subject.driver != "local":
        yield from _isolation(world, found)
    yield from _limits(world, found)
    yield from _signals(found, way.ignored)
    yield from _environment(world, found, way)
    yield from _descriptors(found, Counter(way.descriptors), way.others)
    yield from _other_differences(world, found)


def _add(id_: str, way: StartWay) -> None:
    async def keep(world: PromiseContext) -> None:
        async with world.fresh(python=True, env={"GIVEN": "1"}, limits=_LIMITS, hostname=_HOSTNAME) as box:
            found = await way.state(box)
        same("; ".join(differences(world, way, found)), "")

    text = "has the sandbox's privileges, limits, environment and namespaces, and no descriptor but its own."
    promises.add(id_, f"{way.process} {text}", needs=way.needs, exempt=way.exempt)(keep)


for _id, _way in WAYS.items():
    _add(_id, _way)


@promises.add(
    "WAY-011", "A tool server has no privilege either, and is killed with the process that forked it."
)
async def forked(world: PromiseContext) -> None:
    # The tool server joins the mounts but leaves the pid namespace to its children, so /proc shows none of
    # its descriptors.
    sockets = 3 if world.subject.driver == "apptainer-instance" else 2
    way = StartWay(
        process="A tool server",
        state=tool_server,
        descriptors={"null": 3, "socket": sockets},
        ignored=frozenset({signal.SIGPIPE, signal.SIGXFSZ}),
        is_fork=True,
    )
    async with world.fresh(env={"GIVEN": "1"}, limits=_LIMITS, hostname=_HOSTNAME) as box:
        found = await way.state(box)
    same("; ".join(differences(world, way, found)), "")
    same((found["death_signal"], found["threads"]), (signal.SIGKILL, 1))
    same(found["dumpable"], 0)
