"""Sandbox provider for every NeMo Gym harness, selected by `{prorl: {}}`.

Registered under the entry point group `nemo_gym.sandbox_providers`. The protocol is
`nemo_gym.sandbox.providers.base` of nemo-gym 0.4 and 0.7, including the optional capabilities.
"""

# mypy: allow-subclassing-any, no-warn-return-any, disable-error-code="import-not-found,import-untyped"
# NeMo Gym is an optional extra and ships no types.

import asyncio
import dataclasses
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from nemo_gym.global_config import NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, get_global_config_dict
from nemo_gym.sandbox.providers import base as nemo

from prorl_envs.config import load_settings
from prorl_envs.errors import InputError, ProrlError, SandboxError
from prorl_envs.nemo.box import ProviderSandbox, check_user
from prorl_envs.nemo.drivers import DriverChoice, SharedDriver
from prorl_envs.nemo.images import image_builder
from prorl_envs.nemo.plan import Plan, plan, provider_config, unenforced
from prorl_envs.nemo.ports import SandboxPorts
from prorl_envs.nemo.sharing import SharedSandbox
from prorl_envs.nemo.terminal import TerminalSession
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.isolated import IsolatedDriver
from prorl_envs.sandbox.filesystem.mount_plan import shared_memory_bytes
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.terminal import Open

logger = logging.getLogger(__name__)

#: Agents of NeMo Gym that run a harness in the sandbox.
_HARNESSES_INSIDE = {"anyswe_agent", "opencode_sandboxed_agent", "pi_sandboxed_agent"}


class ProrlSandboxProvider:
    """NeMo Gym sandbox provider. Bound to the event loop in which it is first used.

    Args:
        config: see `plan.ProviderConfig`. Everything else comes from the settings in the environment.

    Raises:
        InputError: a setting is unknown or invalid.
    """

    name = "prorl"

    def __init__(self, **config: Any) -> None:
        self._config = provider_config(config)
        settings = load_settings(environ=os.environ)
        self._choice = DriverChoice.of(self._config, settings)
        self._images = image_builder(settings)
        self._boxes: set[ProviderSandbox] = set()
        self._borrowed: dict[ProviderSandbox, SharedSandbox] = {}
        self._acquiring = asyncio.Lock()
        self._linking = asyncio.Lock()
        self._shared: SharedDriver | None = None

    async def create(self, spec: Any) -> Any:
        """Start a sandbox and return its handle when it accepts commands.

        A missing image is built or pulled first. This time is limited by the setting `image_build_s`, and
        does not count towards `ready_timeout_s`.

        Raises:
            SandboxCreateError: `spec` cannot be satisfied, or the sandbox did not start in time.
        """
        try:
            limits, harness = self._choice.limits.per_sandbox, _harness_inside(spec.metadata or {})
            target = await asyncio.to_thread(
                plan, spec, self._config, limits, harness=harness, find=_server_url
            )
            image = await self._images.resolve(target.image)  # with its own time limit
            async with asyncio.timeout(target.ready_s):
                box = await self._start(target, image)
        except TimeoutError:
            raise nemo.SandboxCreateError(f"the sandbox was not ready in {target.ready_s:g} s") from None
        except (ProrlError, OSError) as error:
            raise nemo.SandboxCreateError(str(error)) from error
        return self._handle(box)

    async def exec(
        self,
        handle: Any,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> Any:
        """Run a command in a new shell.

        Returns:
            the result. If the command has no exit status, `error_type` is `timeout`, `sandbox` or `exec`, and
            the output so far is included.

        Raises:
            ValueError: `user` is not the user of the sandbox.
            InputError: `timeout_s` is not a valid time.
        """
        box: ProviderSandbox = handle.raw
        _check_user(user, box)
        seconds = self._config.default_timeout_s if timeout_s is None else float(timeout_s)
        done = await box.exec(command, cwd=cwd, env=env, timeout_s=seconds)
        return nemo.SandboxExecResult(
            stdout=done.stdout, stderr=done.stderr, return_code=done.return_code, error_type=done.error
        )

    async def exec_with_background_services(
        self, handle: Any, command: str, *, cwd: str | None = None, timeout_s: float | None = None
    ) -> Any:
        """Run a command like `exec`, which keeps background processes alive anyway."""
        return await self.exec(handle, command, cwd=cwd, timeout_s=timeout_s)

    async def upload_file(self, handle: Any, source_path: Path, target_path: str) -> None:
        """Copy a file into the sandbox; see `ProviderSandbox.upload`."""
        await handle.raw.upload(Path(source_path), target_path)

    async def download_file(self, handle: Any, source_path: str, target_path: Path) -> None:
        """Copy a file out of the sandbox; see `ProviderSandbox.download`."""
        await handle.raw.download(source_path, Path(target_path))

    async def status(self, handle: Any) -> Any:
        """Return `RUNNING`, `PAUSED` or `STOPPED`."""
        box: ProviderSandbox = handle.raw
        if not box.alive:
            return nemo.SandboxStatus.STOPPED
        return nemo.SandboxStatus.PAUSED if box.paused else nemo.SandboxStatus.RUNNING

    async def pause(self, handle: Any) -> None:
        """Stop every process inside; memory, files and connections stay. Raise SandboxError on failure."""
        await handle.raw.pause()

    async def resume(self, handle: Any) -> None:
        """Continue the processes of a paused sandbox. Raise SandboxError on failure."""
        await handle.raw.resume()

    async def create_pty(self, handle: Any, spec: Any) -> TerminalSession:
        """Open an interactive session: a shell, or `spec.command` in one.

        Raises:
            ValueError: `spec.user` is not the user of the sandbox.
            SandboxPtyError: the session cannot be started.
        """
        box: ProviderSandbox = handle.raw
        _check_user(spec.user, box)
        argv = [box.shell] if spec.command is None else [box.shell, "-c", spec.command]
        request = Open(
            argv, box.path(spec.cwd or ""), dict(spec.env or {}), spec.pty, int(spec.rows), int(spec.cols)
        )
        try:
            return await TerminalSession.open(box.sandbox, request, error=nemo.SandboxPtyError)
        except ProrlError as error:
            raise nemo.SandboxPtyError(str(error)) from error

    async def endpoint(self, handle: Any, port: int) -> Any:
        """Return the URL at which this machine reaches a port inside.

        Raises:
            SandboxError: another process owns the sandbox, or it has the host's network.
        """
        return nemo.SandboxEndpoint(endpoint=f"http://127.0.0.1:{await _ports(handle).publish(port)}")

    def network_policy_options(self, urls: list[str]) -> dict[str, Any]:
        """Return the options of a sandbox that reaches these servers alone: see docs/upstream."""
        return {"servers": urls}

    def validate_networking(self) -> None:
        """Accept networks of sandboxes; `network_address` refuses the local driver."""

    validate_port_forwarding = validate_networking

    async def network_address(self, handle: Any) -> str:
        """Return the address by which others know this sandbox. Raises SandboxError as `endpoint`."""
        return await _ports(handle).join()

    async def set_hosts(self, handle: Any, hosts: Mapping[str, str]) -> None:
        """Connect the sandbox with those at these addresses, and append their names to its /etc/hosts.

        Raises:
            InputError: no sandbox of this provider has such an address.
            SandboxError: /etc/hosts cannot be written, the kernel refuses the link, or as of `endpoint`.
        """
        peers = [self._peer(address) for address in dict.fromkeys(hosts.values())]
        async with self._linking:
            await _ports(handle).link(peers)
        lines = "".join(f"{address} {name}\n" for name, address in hosts.items())
        await handle.raw.append("/etc/hosts", lines.encode())

    async def forward_ports(
        self, handle: Any, target_address: str, ports: tuple[int, ...], *, ready_file: str
    ) -> None:
        """Forward ports of the sandbox's loopback to another one, until it closes. Raises as `set_hosts`."""
        await _ports(handle).forward(self._peer(target_address), ports)
        await handle.raw.tools.write(ready_file, b"ready\n")
        await asyncio.Event().wait()

    def validate_runtime_requirements(
        self, *, cap_add: tuple[str, ...], shm_size: int | None
    ) -> Mapping[str, str]:
        """Accept the size of /dev/shm that a Compose service requires, up to the size that it has here.

        Raises:
            InputError: the service requires a capability, or more shared memory.
        """
        if cap_add:
            raise InputError(
                f"a service requires cap_add {', '.join(cap_add)}, and no program here has a capability",
                hint="root can listen on any port without; else use a provider with containers",
            )
        _check_shared_memory(shm_size, SandboxSpec(limits=self._choice.limits.per_sandbox))
        return {}

    async def configure_runtime(self, handle: Any, *, cap_add: tuple[str, ...], shm_size: int | None) -> None:
        """Check the requirements again, with the limits of this sandbox. Raises as `validate_...`."""
        _check_shared_memory(shm_size, handle.raw.sandbox.spec)

    def shared_volume_metadata(self) -> Mapping[str, str]:
        """Return nothing, because there are no shared volumes."""
        return {}

    def shared_volume_options(self, source: str | None, target: str, *, read_only: bool = False) -> NoReturn:
        """Raise InputError: these sandboxes share no volumes."""
        raise InputError(
            f"a service has a volume at {target}, and these sandboxes share no volumes",
            hint="give each service a directory of the host: provider_options: {binds: SOURCE:TARGET:rw}",
        )

    async def serialize_handle(self, handle: Any, *, scope: str | None = None) -> dict[str, Any]:
        """Return the descriptor that `connect` needs in another process of this user on this node.

        Args:
            scope: used by NeMo Gym's remote provider; ignored here, because a borrower may do everything.
        """
        box: ProviderSandbox = handle.raw
        return {
            "provider": self.name,
            "sandbox_id": box.sandbox.id,
            "workdir": box.workdir,
            "hostname": socket.gethostname(),
            "run_dir": str(self._choice.base),
        }

    async def connect(self, descriptor: Mapping[str, Any]) -> Any:
        """Borrow a sandbox that another process owns. The sandbox closes with its owner.

        Args:
            descriptor: result of `serialize_handle`; `sandbox_id` suffices if both processes have the same
                `run_dir`.

        Raises:
            InputError: the descriptor belongs to another provider or another node.
            SandboxError: the owner has exited, or has closed the sandbox.
        """
        here = socket.gethostname()
        if descriptor.get("provider", self.name) != self.name or descriptor.get("hostname", here) != here:
            raise InputError(
                f"cannot borrow a sandbox of {descriptor.get('provider')} on {descriptor.get('hostname')}",
                hint=f"this is {self.name} on {here}",
            )
        base = Path(descriptor.get("run_dir") or self._choice.base)
        sandbox = await SharedSandbox.borrow(str(descriptor.get("sandbox_id")), base)
        try:
            box = ProviderSandbox(
                sandbox,
                await Toolbox.open(sandbox),
                self._config,
                shell=sandbox.shell,
                workdir=descriptor.get("workdir") or sandbox.workdir,
                isolated=sandbox.isolated,
            )
        except BaseException:
            sandbox.release()
            raise
        self._borrowed[box] = sandbox
        return self._handle(box)

    async def close(self, handle: Any) -> None:
        """Close the sandbox and kill its processes, also if it is borrowed. Idempotent."""
        await handle.raw.close()
        self._boxes.discard(handle.raw)
        self._borrowed.pop(handle.raw, None)

    async def aclose(self) -> None:
        """Close every sandbox of this provider, and the driver if no other provider uses it. Idempotent.

        Borrowed sandboxes are released, not closed.
        """
        borrowed, self._borrowed = self._borrowed, {}
        for box, sandbox in borrowed.items():
            await box.tools.aclose()
            sandbox.release()
        boxes, self._boxes = self._boxes, set()
        outcomes = await asyncio.gather(*(box.close() for box in boxes), return_exceptions=True)
        shared, self._shared = self._shared, None
        if shared is not None:
            await shared.release()
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _start(self, target: Plan, image: Path | None) -> ProviderSandbox:
        shared = await self._driver()
        for warning in unenforced(target.asked, shared.driver.enforced_limits, self._config):
            logger.warning("%s", warning)
        env = {} if image is None else await shared.driver.image_env(image)
        sandbox = await shared.driver.start(target.with_image(image, env))
        ports = None
        if isinstance(shared.driver, IsolatedDriver):
            ports = SandboxPorts(sandbox, shared.driver.gateway)
        elif target.workdir == target.spec.workdir:  # a path that only isolated sandboxes have
            target = dataclasses.replace(target, workdir=str(sandbox.workspace))
        box = await ProviderSandbox.open(sandbox, target, self._config, ports)
        self._boxes.add(box)  # from here on, `aclose` closes the sandbox, even if this call fails
        shared.sharing.offer(box)
        box.on_close = lambda: shared.sharing.withdraw(box)
        return box

    def _peer(self, address: str) -> SandboxPorts:
        for box in self._boxes:
            if box.ports is not None and box.ports.address == address:
                return box.ports
        raise InputError(f"no sandbox of this provider has the address {address}")

    def _handle(self, box: ProviderSandbox) -> Any:
        return nemo.SandboxHandle(sandbox_id=box.sandbox.id, provider_name=self.name, raw=box)

    async def _driver(self) -> SharedDriver:
        async with self._acquiring:
            if self._shared is None:
                self._shared = await SharedDriver.acquire(self._choice)
            return self._shared


def _check_shared_memory(size: int | None, spec: SandboxSpec) -> None:
    if size is not None and size > (available := shared_memory_bytes(spec)):
        raise InputError(
            f"a service requires {size} bytes of /dev/shm, and has at most {available}",
            hint="it has a quarter of the memory limit, at most 256 MiB",
        )


def _ports(handle: Any) -> SandboxPorts:
    box: ProviderSandbox = handle.raw
    if box.ports is None:
        reason = "another process owns it" if box.isolated else "with the local driver, it has the host's"
        raise SandboxError(f"sandbox {box.sandbox.id} has no network of its own here: {reason}")
    return box.ports


def _gym_config() -> Mapping[str, Any]:
    """Return the configuration of the NeMo Gym that started this process; {} if there is none."""
    # In any other process, NeMo Gym would take the command line for its own.
    started = NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME in os.environ
    return get_global_config_dict() if started else {}


def _server_url(name: str) -> str:
    if "://" in name:
        return name
    try:
        ((server, *_), *_) = (kinds.values() for kinds in _gym_config()[name].values())
        return f"http://{server['host']}:{server['port']}"
    except (LookupError, AttributeError, ValueError, TypeError):
        raise InputError(
            f"NeMo Gym has no server {name!r}", hint="name one of its blocks, or a URL"
        ) from None


def _harness_inside(metadata: Mapping[str, str]) -> str:
    """Return the agent that will run its harness in a sandbox with this metadata; "" if none is known.

    Its creator names itself there: the agent, or the resources server that hands it to the agent.
    """
    creator = metadata.get("nemo_gym_agent")
    for name, block in _gym_config().items():
        agents = block.get("responses_api_agents") if isinstance(block, Mapping) else None
        for kind, agent in (agents or {}).items():
            server = agent.get("resources_server") or {}
            if kind in _HARNESSES_INSIDE and creator in (name, kind, server.get("name")):
                return str(name)
    return ""


def _check_user(user: str | int | None, box: ProviderSandbox) -> None:
    """Check the user; NeMo Gym's callers expect ValueError for an unsupported user."""
    try:
        check_user(user, box.sandbox.spec.uid)
    except InputError as error:
        raise ValueError(str(error)) from error
