"""Running services of a task, each in a sandbox of its own, on networks with the agent's sandbox.

They run from the start of an episode to its end, so that the tests find the state that the agent left.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from prorl_envs.env.node import Node
from prorl_envs.env.task_files import content_of
from prorl_envs.envs.terminal.files import Files
from prorl_envs.envs.terminal.images import TaskImage, task_image
from prorl_envs.envs.terminal.machines import machine_spec, shell_command
from prorl_envs.envs.terminal.options import TerminalOptions
from prorl_envs.envs.terminal.task import Condition, HealthCheck, Phase, Service, TerminalTask
from prorl_envs.errors import EnvironmentFault, InputError, SandboxError, ToolError
from prorl_envs.sandbox.drivers.network import SandboxNetwork
from prorl_envs.sandbox.filesystem.layered import ImageConfig
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.types import Completed

logger = logging.getLogger(__name__)

#: Member of the network that is the agent's sandbox, or the verifier's after it.
AGENT = ""
_FOREVER_S = 1e9
_SETUP_S = 60.0
#: Timeout of the start of all services, once their images are built, in seconds.
_START_S = 600.0
_LOG_BYTES, _SHOWN_BYTES = 64 * 1024, 2000
#: Pause in seconds between checks before the time of the first one that counts; and before a restart, with
#: the number of times that it doubles.
_EARLY_S = 0.5
_RESTART_S, _DOUBLINGS = 0.1, 9
#: Docker's defaults: https://docs.docker.com/reference/dockerfile/#healthcheck
_DEFAULTS = {"interval_s": 30.0, "timeout_s": 30.0, "start_interval_s": 5.0, "retries": 3}
#: Fields of an image's health check, in nanoseconds except the retries.
_NUMBERS = {
    "interval_s": "Interval",
    "timeout_s": "Timeout",
    "start_period_s": "StartPeriod",
    "start_interval_s": "StartInterval",
    "retries": "Retries",
}


class TaskServices:
    """Services of one episode. Closed with `aclose`, after the tests.

    Args:
        node: starts the sandboxes.
        options: options of the family.
        task: the task.
    """

    def __init__(self, node: Node, options: TerminalOptions, task: TerminalTask) -> None:
        machine = task.machine
        members = {AGENT: machine.networks, **{one.name: one.networks for one in machine.services}}
        #: Connects the sandboxes; None without services.
        self.network = SandboxNetwork(members) if machine.services else None
        self._node, self._options, self._files = node, options, task.files
        conditions = [*machine.depends_on.items()]
        conditions += [item for service in machine.services for item in service.depends_on.items()]
        jobs = {name for name, condition in conditions if condition == "service_completed_successfully"}
        self._running = {one.name: _Running(one, is_job=one.name in jobs) for one in machine.services}
        self._conditions = machine.depends_on
        self._sessions: list[SandboxSession] = []

    def hosts(self, member: str) -> Mapping[str, str]:
        """Return the addresses that a member knows, by name."""
        return {} if self.network is None else self.network.hosts(member)

    async def join(self, session: SandboxSession) -> None:
        """Connect the sandbox of the agent or of the verifier, instead of the one before.

        Raises:
            SandboxError: the sandbox cannot be connected.
        """
        if self.network is not None:
            await self.network.join(AGENT, session.sandbox)

    def session(self, service: str) -> SandboxSession:
        """Return the sandbox of a service."""
        return self._running[service].session

    async def start(self) -> None:
        """Start all services in their order, and wait until all that have a health check are healthy.

        Raises:
            EnvironmentFault: a service cannot start, has ended with an error, or is not healthy. The message
                has the end of its output.
            SandboxError, ToolError: our infrastructure failed.
        """
        images = [
            await service_image(self._node, self._options, self._files, one.service)
            for one in self._running.values()
        ]
        limit_s = _START_S * self._options.timeout_factor
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
                for one, image in zip(self._running.values(), images, strict=True):
                    group.create_task(self._start(one, image))
                group.create_task(self._reached(self._conditions))
        except TimeoutError:
            raise EnvironmentFault(f"the services did not start in {limit_s:g} s") from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for one in self._running.values():
            await one.check_end()

    async def aclose(self) -> None:
        """Kill all services. Idempotent."""
        closed = await asyncio.gather(
            *(session.aclose() for session in self._sessions), return_exceptions=True
        )
        runs = [one.run for one in self._running.values() if one.run is not None]
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        for error in closed:
            if error is not None:
                raise error

    async def _reached(self, conditions: Mapping[str, Condition]) -> None:
        for name, condition in conditions.items():
            await self._running[name].reached(condition)

    async def _start(self, one: "_Running", image: TaskImage) -> None:
        service = one.service
        await self._reached(service.depends_on)
        hosts, limits = self.hosts(service.name), self._node.limits
        spec = machine_spec(image, service, Phase(), self._options, limits, hosts)
        session = await self._node.open_session(spec)
        self._sessions.append(session)
        assert self.network is not None
        await self.network.join(service.name, session.sandbox)
        files = {path: content_of(self._files[source]) for path, source in service.files.items()}
        await one.start(session, image.image.config, files)


async def service_image(
    node: Node,
    options: TerminalOptions,
    files: Files,
    service: Service,
    progress: Callable[[str], None] = lambda line: None,
) -> TaskImage:
    """Return the image of a service. Raises as `task_image`, with the service's name."""
    factor = options.timeout_factor
    try:
        return await task_image(node, files, service, timeout_factor=factor, progress=progress)
    except EnvironmentFault as error:
        raise EnvironmentFault(f"the service {service.name}: {error.message}", hint=error.hint) from error


class _Running:
    """One service, and the state that others wait for."""

    def __init__(self, service: Service, *, is_job: bool) -> None:
        self.service, self._is_job = service, is_job
        self.session: SandboxSession
        self.run: asyncio.Task[Completed] | None = None
        self._stopping = False
        self._started, self._healthy = asyncio.Event(), asyncio.Event()
        self._check: HealthCheck | None = None

    async def reached(self, condition: Condition) -> None:
        """Wait for a condition. Raises EnvironmentFault if it cannot be reached."""
        await self._started.wait()
        if condition == "service_completed_successfully":
            assert self.run is not None
            await asyncio.wait([self.run])
            await self.check_end()
        elif condition == "service_healthy" and self._check is None:
            raise self._fault("has no health check, but another service waits until it is healthy")
        elif condition == "service_healthy":
            await self._healthy.wait()

    async def start(
        self, session: SandboxSession, config: ImageConfig, files: Mapping[str, tuple[bytes, bool]]
    ) -> None:
        self.session = session
        await self._make_volumes(files)
        argv = command(self.service, config)
        if not argv:
            raise self._fault("has no command")
        self._check = None if self._is_job else health_check(self.service.healthcheck, config)
        self.run = asyncio.create_task(self._keep_running(argv))
        # The tool server starts processes in the order of the requests, so the service runs after this.
        await session.tools.run(["/bin/sh", "-c", ":"], cwd="/", timeout_s=_SETUP_S)
        self._started.set()
        if self._check is not None:
            await self._wait_healthy(self._check)
            self._healthy.set()

    async def _make_volumes(self, files: Mapping[str, tuple[bytes, bool]]) -> None:
        argv = ["/bin/mkdir", "-p", "--", "/tmp", *self.service.folders]
        try:
            done = await self.session.tools.run(argv, cwd="/", timeout_s=_SETUP_S)
            for path, (data, executable) in files.items():
                await self.session.tools.write(path, data, mode=0o755 if executable else 0o644)
        except (OSError, InputError) as error:
            raise self._fault(f"cannot have its volumes: {error}") from error
        if done.exit_code != 0:
            raise self._fault("cannot have its volumes", done)

    async def check_end(self) -> None:
        """Raise EnvironmentFault if the service has ended with an error."""
        if self.run is not None and self.run.done():
            try:
                done = self.run.result()
            except OSError as error:
                raise self._fault(f"cannot start: {error.strerror}") from error
            if done.exit_code != 0:
                raise self._fault(f"ended with exit status {done.exit_code}", done)

    async def _keep_running(self, argv: tuple[str, ...]) -> Completed:
        for restart in itertools.count():
            done = await self.session.tools.run(argv, timeout_s=_FOREVER_S, output_limit=_LOG_BYTES)
            again = self.service.always or done.exit_code != 0
            limit = self.service.restarts
            if self._stopping or not again or (limit is not None and restart >= limit):
                break
            await asyncio.sleep(_RESTART_S * 2 ** min(restart, _DOUBLINGS))
        logger.info("the service %s ended with exit status %s", self.service.name, done.exit_code)
        return done

    async def _wait_healthy(self, check: HealthCheck) -> None:
        assert self.run is not None
        checking = asyncio.create_task(wait_healthy(self.session, check, early=True))
        try:
            await asyncio.wait([checking, self.run], return_when=asyncio.FIRST_COMPLETED)
            if checking.done():
                await checking
                return
        except EnvironmentFault as error:
            raise self._fault(f"is not healthy: {error.message}", await self._end()) from error
        finally:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)
        await self.check_end()
        raise self._fault("ended before it was healthy", self.run.result())

    async def _end(self) -> Completed | None:
        """Kill the programs of the service, and return the result with their output."""
        assert self.run is not None
        self._stopping = True
        with contextlib.suppress(OSError, SandboxError, ToolError, TimeoutError):
            await self.session.tools.run(["/bin/sh", "-c", "kill -KILL -1"], cwd="/", timeout_s=_SETUP_S)
            async with asyncio.timeout(_SETUP_S):
                return await self.run
        return None

    def _fault(self, problem: str, done: Completed | None = None) -> EnvironmentFault:
        output = b"" if done is None else done.output[-_SHOWN_BYTES:]
        text = f"; its output ends with: {output.decode(errors='replace').strip()}" if output.strip() else ""
        return EnvironmentFault(f"the service {self.service.name} {problem}{text}")


def command(service: Service, config: ImageConfig) -> tuple[str, ...]:
    """Return the program of a service with its arguments; an entry point of the service ignores the image's
    default arguments."""
    default = config.command if service.entrypoint is None else ()
    entrypoint = config.entrypoint if service.entrypoint is None else service.entrypoint
    return (*entrypoint, *(default if service.command is None else service.command))


def health_check(own: Mapping[str, Any], config: ImageConfig) -> HealthCheck | None:
    """Return the health check of a service: its own settings, else those of its image; None without one."""
    image = config.healthcheck or {}  # an image is untrusted
    numbers = {name: image.get(key) for name, key in _NUMBERS.items()}
    found: dict[str, Any] = {**_DEFAULTS}
    for name, value in numbers.items():
        if isinstance(value, int) and 0 < value < _FOREVER_S * 1e9:
            found[name] = value if name == "retries" else value / 1e9
    test = own.get("test", image.get("Test"))
    kind, *words = [str(word) for word in test] if isinstance(test, list | tuple) and test else ["NONE"]
    if kind not in ("CMD", "CMD-SHELL") or not words:
        return None
    argv = words if kind == "CMD" else [*config.shell, words[0]]
    given = {name: value for name, value in own.items() if name != "test"}
    return HealthCheck.model_validate({**found, **given, "argv": tuple(argv)})


async def wait_healthy(session: SandboxSession, check: HealthCheck, *, early: bool = False) -> None:
    """Run a health check until it succeeds.

    Args:
        early: whether checks count only after the first interval, as in Docker. Earlier ones save time.

    Raises:
        EnvironmentFault: the check failed too often after its start period, or cannot run.
    """
    started, failures = time.monotonic(), 0
    argv = list(check.argv) or shell_command("-c", check.command)
    early_s = check.interval_s if early else 0.0
    while True:
        elapsed_s = time.monotonic() - started
        try:
            done = await session.tools.run(argv, timeout_s=check.timeout_s)
        except OSError as error:
            raise EnvironmentFault(f"the health check cannot run: {error.strerror}") from error
        if done.exit_code == 0:
            return
        starting = elapsed_s < max(check.start_period_s, early_s)
        failures += not starting
        if failures >= max(check.retries, 1):
            text = done.output.decode(errors="replace")[-500:]
            raise EnvironmentFault(f"the health check failed {failures} times: {text}")
        pause_s = check.start_interval_s if starting else check.interval_s
        await asyncio.sleep(min(pause_s, _EARLY_S) if early and starting else pause_s)
