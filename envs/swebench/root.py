"""Built instance: its tree on the host, and the specs of its sandboxes."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from prorl_envs.envs.swebench.interpreters import mounts_of
from prorl_envs.envs.swebench.task import HIDDEN
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.filesystem.mount_plan import DEFAULT_ENV
from prorl_envs.sandbox.filesystem.python_runtime import system_masks

TESTBED = "/testbed"
#: Path of the environment in each sandbox, also during the fetch; the same as in the official images.
CONDA = "/opt/miniconda3"
VENV = f"{CONDA}/envs/testbed"
WHEELS = f"{CONDA}/wheels"
SDIST = f"{CONDA}/sdist"


class BuiltRoot(BaseModel):
    """A built instance, as described by its `built.json`.

    Args:
        folder: folder of the build on the host; its content never changes.
        base_commit: name of the only commit of the repository.
        testbed: path of the tree in a sandbox.
        prefix: if built from a release: installation directory of the interpreter.
        image: if built from an image: path of the image.
        env: if built from an image: environment variables of its processes.
        hidden_directories, hidden_files: if built from an image: paths in it that the agent must not see.
    """

    model_config = ConfigDict(frozen=True)

    folder: Path
    base_commit: str
    testbed: str = TESTBED
    prefix: Path | None = None
    image: Path | None = None
    env: Mapping[str, str] = {}
    hidden_directories: tuple[str, ...] = ()
    hidden_files: tuple[str, ...] = ()

    @property
    def tree(self) -> Path:
        """The tree at the base commit, on the host."""
        return self.folder / "testbed"

    def agent_spec(self, *further: Mount, default_route: bool = False) -> SandboxSpec:
        """Return the spec of the agent's sandbox, with its workspace at the path of the tree.

        Args:
            further: additional mounts.
            default_route: as in `SandboxSpec`.
        """
        empty = self.folder / "empty"
        hidden = tuple(Mount(source=empty, target=path) for path in self.hidden_files)
        return self._spec(
            *further,
            *hidden,
            workdir=self.testbed,
            masks=self.hidden_directories,
            default_route=default_route,
        )

    def grading_spec(self, *, default_route: bool = False) -> SandboxSpec:
        """Return the spec of a grading sandbox: the pristine tree, and the files hidden from the agent."""
        tree = Mount(source=self.tree, target=self.testbed, overlay=True)
        hidden = self.folder / "hidden"
        further = (Mount(source=hidden, target=HIDDEN),) if self.image is not None else ()
        return self._spec(tree, *further, workdir="/workspace", default_route=default_route)

    def comparing_spec(self, *further: Mount) -> SandboxSpec:
        """Return the spec of a sandbox with the host's system and the pristine tree, to compare trees by git.

        Args:
            further: additional mounts.
        """
        tree = Mount(source=self.tree, target=TESTBED, overlay=True)
        return SandboxSpec(workdir="/workspace", mounts=(tree, *further))

    def _spec(
        self, *further: Mount, workdir: str, masks: tuple[str, ...] = (), default_route: bool
    ) -> SandboxSpec:
        if self.image is not None:
            # User 0, because the tests of the images expect it; it has no capabilities.
            return SandboxSpec(
                image=self.image, workdir=workdir, env=self.env, mounts=further, masks=masks, uid=0,
                default_route=default_route,
            )  # fmt: skip
        assert self.prefix is not None
        conda = Mount(source=self.folder / "miniconda3", target=CONDA, overlay=True)
        return release_spec(conda, self.prefix, *further, workdir=workdir, default_route=default_route)


def release_spec(
    conda: Mount, prefix: Path, *further: Mount, workdir: str, default_route: bool = False
) -> SandboxSpec:
    """Return the spec of the sandbox in which an instance is built from a release, solved and graded."""
    # The interpreter's own packages are not part of the instance, and may include this package.
    packages = tuple(str(folder) for folder in prefix.glob("lib/python3.*/site-packages"))
    visible = prefix.is_relative_to("/usr")
    return SandboxSpec(
        workdir=workdir,
        env={
            "PATH": f"{VENV}/bin:{DEFAULT_ENV['PATH']}",
            "VIRTUAL_ENV": VENV,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": WHEELS,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
        mounts=(conda, *mounts_of(prefix), *further),
        masks=system_masks() if visible else (*system_masks(), *packages),
        default_route=default_route,
    )
