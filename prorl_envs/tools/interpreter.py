"""What a sandbox must see so that a Python session forked from the host's interpreter can import.

A forked session has in memory what its template imported; everything else it imports from files, which are
the host interpreter's own and not part of a sandbox's system.
"""

import site
import sys
from pathlib import Path

from prorl_envs.sandbox.base import Mount

#: Always part of a sandbox's system.
_SYSTEM = Path("/usr")
#: Hidden from sessions: an installed package carries the tasks' reference solutions.
_HIDDEN = ("prorl_envs", "resources_servers", "environments")


def interpreter_mounts() -> tuple[Mount, ...]:
    """The running interpreter's installation and its virtual environment, read-only at their own paths.

    For `SandboxSpec.mounts`, together with `interpreter_masks`.
    """
    roots = dict.fromkeys(Path(prefix).resolve() for prefix in (sys.base_prefix, sys.prefix))
    return tuple(Mount(source=root, target=str(root)) for root in roots if not root.is_relative_to(_SYSTEM))


def interpreter_masks() -> tuple[str, ...]:
    """Folders within the mounts that no session may read. For `SandboxSpec.masks`."""
    libraries = {Path(path).resolve() for path in site.getsitepackages()}
    return tuple(str(path / name) for path in sorted(libraries) for name in _HIDDEN if (path / name).is_dir())
