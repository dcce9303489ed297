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
from typing import Any

from nemo_gym.sandbox.providers import base as nemo

from prorl_envs.config import load_settings
from prorl_envs.errors import InputError, ProrlError
from prorl_envs.nemo.box import ProviderSandbox, check_user
from prorl_envs.nemo.drivers import DriverChoice, SharedDriver
from prorl_envs.nemo.images import image_builder
from prorl_envs.nemo.plan import Plan, plan, provider_config, unenforced
from prorl_envs.nemo.sharing import SharedSandbox
from prorl_envs.nemo.terminal import TerminalSession
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.terminal import Open

logger = logging.getLogger(__name__)


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
        self._shared: SharedDriver | None = None

    async def create(self, spec: Any) -> Any:
        """Start a sandbox and return its handle when it accepts commands.

        A missing image is built or pulled first. This time is limited by the setting `image_build_s`, and
        does not count towards `ready_timeout_s`.

        Raises:
            SandboxCreateError: `spec` cannot be satisfied, or the sandbox did not start in time.
        """
        try:
            target = await asyncio.to_thread(plan, spec, self._config, self._choice.limits.per_sandbox)
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
        """Stop every process in the sandbox; memory, files and connections stay.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        await handle.raw.pause()

    async def resume(self, handle: Any) -> None:
        """Continue the processes of a paused sandbox.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
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
                shell=sandbox.shell,
                workdir=descriptor.get("workdir") or sandbox.workdir,
                isolated=sandbox.isolated,
                output_limit=self._config.output_limit,
                concurrency=self._config.concurrency,
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
        isolated = shared.driver.name != "local"
        if not isolated and target.workdir == target.spec.workdir:  # a path that only isolated sandboxes have
            target = dataclasses.replace(target, workdir=str(sandbox.workspace))
        box = await ProviderSandbox.open(
            sandbox,
            target,
            isolated=isolated,
            output_limit=self._config.output_limit,
            concurrency=self._config.concurrency,
        )
        self._boxes.add(box)  # from here on, `aclose` closes the sandbox, even if this call fails
        shared.sharing.offer(box)
        box.on_close = lambda: shared.sharing.withdraw(box)
        return box

    def _handle(self, box: ProviderSandbox) -> Any:
        return nemo.SandboxHandle(sandbox_id=box.sandbox.id, provider_name=self.name, raw=box)

    async def _driver(self) -> SharedDriver:
        async with self._acquiring:
            if self._shared is None:
                self._shared = await SharedDriver.acquire(self._choice)
            return self._shared


def _check_user(user: str | int | None, box: ProviderSandbox) -> None:
    """Check the user; NeMo Gym's callers expect ValueError for an unsupported user."""
    try:
        check_user(user, box.sandbox.spec.uid)
    except InputError as error:
        raise ValueError(str(error)) from error
