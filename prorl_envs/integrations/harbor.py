"""Harbor (0.26): `harbor run --env prorl_envs.integrations.harbor:ProrlEnvironment`."""

# mypy: allow-subclassing-any

import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from prorl_envs.envs.terminal.machines import shell_command
from prorl_envs.errors import InputError
from prorl_envs.extras import install_packages
from prorl_envs.images.dockerfile.run import RunFailed
from prorl_envs.images.threads import in_thread
from prorl_envs.integrations.sandbox import TRANSFER_S, FrameworkSandbox, in_node, start, stop
from prorl_envs.sandbox.base import Network

try:
    from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
    from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
    from harbor.environments.definition import COMPOSE_FILE_NAME, require_agent_environment_definition
    from harbor.environments.options import EnvironmentOptions
except ImportError as error:
    raise InputError("harbor is not installed", hint=install_packages("harbor>=0.26")) from error


class HarborOptions(EnvironmentOptions):
    """Options: `--ek NAME=VALUE`.

    Args:
        public_network: hosts that tasks with a public network reach, as in `Network.allow`; or `open`, the
            host's network with its loopback. By default, none.
    """

    public_network: tuple[str, ...] | Literal["open"] = ()


class ProrlEnvironment(BaseEnvironment):
    """Environment of a Harbor trial, in a rootless sandbox."""

    options_model = HarborOptions
    _box: FrameworkSandbox | None = None

    @staticmethod
    def type() -> str:
        return "prorl"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        kinds = ("hostnames", "wildcard_hostnames", "ipv4_addresses")
        allowlist = {f"network_allowlist_{kind}": True for kind in kinds}
        return EnvironmentCapabilities(disable_internet=True, network_allowlist=True, **allowlist)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True, fractional_cpus=True)

    def _validate_definition(self) -> None:
        image, folder = self.task_env_config.docker_image, self.environment_dir
        require_agent_environment_definition(folder, docker_image=image)
        if (folder / COMPOSE_FILE_NAME).exists():
            raise ValueError(f"{folder / COMPOSE_FILE_NAME}: prorl has no Compose services")
        if self._host_mounts:
            raise ValueError("prorl mounts no directories of the host")

    async def start(self, force_build: bool) -> None:
        config, dockerfile = self.task_env_config, self.environment_dir / "Dockerfile"
        is_built = dockerfile.exists() and (force_build or not config.docker_image)
        try:
            self._box = await start(
                dockerfile if is_built else config.docker_image,
                workdir=config.workdir,
                env=self._startup_env(),
                network=self._network(),
                memory_bytes=(self._effective_memory_mb or 0) << 20,
                disk_bytes=(self._effective_storage_mb or 0) << 20,
                cpus=self._effective_cpus,
            )
        except (InputError, RunFailed) as error:
            raise SandboxBuildFailedError(str(error)) from error
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    def _network(self) -> Network:
        if not self._network_is_public:
            return Network(allow=tuple(self.network_policy.allowed_hosts))
        hosts = self.options.public_network
        if hosts == "open":
            return Network(open=True, reason="public_network is open")
        if not hosts:
            self.logger.warning("the task's network is public, but reaches no host: set public_network")
        return Network(allow=tuple(hosts))

    async def stop(self, delete: bool) -> None:
        """Kill all processes, and delete all files. Images stay in the cache."""
        box, self._box = self._box, None
        if box is not None:
            await stop(box)

    async def exec(
        self, command: str, cwd: str | None = None, env: dict[str, str] | None = None,
        timeout_sec: int | None = None, user: str | int | None = None,
    ) -> ExecResult:  # fmt: skip
        """Run a command in a new bash, or sh. Raises RuntimeError after `timeout_sec`, as Docker's does."""
        if self._resolve_user(user) not in (None, "root", 0, "0"):
            raise ValueError(f"commands run as root of the image, the only user, not as {user!r}")
        options: dict[str, Any] = {"cwd": cwd, "env": self._merge_env(env), "timeout_s": timeout_sec}
        done = await in_node(self._opened().run(shell_command("-c", command), **options))
        if done.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        stdout, stderr = (data.decode(errors="replace") for data in (done.output, done.errors))
        if callback := self._output_callback():
            await callback(stdout, "stdout")
            await callback(stderr, "stderr")
        return ExecResult(stdout=stdout, stderr=stderr, return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file or a tree into the sandbox: see `Toolbox.upload`."""
        tools, target = self._opened().session.tools, self._opened().path(target_path)
        await in_node(tools.upload(Path(source_path), target, timeout_s=TRANSFER_S))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.upload_file(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out of the sandbox, or merge a tree without sockets and the like into a directory."""
        await in_node(self._download(source_path, Path(target_path)))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.download_file(source_dir, target_dir)

    async def _download(self, source: str, target: Path) -> None:
        tools, inside = self._opened().session.tools, self._opened().path(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".prorl-") as folder:
            copy = Path(folder, "copy")
            await tools.download(inside, copy, timeout_s=TRANSFER_S, skip_unsupported=True)
            await in_thread(_merge, copy, target)

    def _opened(self) -> FrameworkSandbox:
        if self._box is None:
            raise RuntimeError("the environment is not started")
        return self._box


def _merge(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        source.replace(target)
