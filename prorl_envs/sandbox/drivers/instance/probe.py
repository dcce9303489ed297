"""Check whether Apptainer alone can start sandboxes, on machines whose namespaces cannot be joined."""

import os
import subprocess
import tempfile
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.apptainer_probe import find_apptainer, uses_setuid
from prorl_envs.sandbox.drivers.apptainer_wrapper import wrapper_environment
from prorl_envs.sandbox.drivers.instance.command import (
    InstanceFiles,
    apptainer_command,
    explain_instance,
    explain_shared,
    write_system,
)
from prorl_envs.sandbox.drivers.probe import Check
from prorl_envs.sandbox.filesystem.host_system import write_names

_TIMEOUT_S = 60.0
_NAME = "an Apptainer each"
#: Prints its pid (1 in a new pid namespace), and its network interfaces.
_LOOK = "echo $$; while read -r name rest; do case $name in *:) echo ${name%:};; esac; done < /proc/net/dev"


def instance_check(base: Path, chosen: Path | None = None) -> Check:
    """Try to start a sandbox as `InstanceDriver` does, below `base`. Blocks, for some 300 ms.

    Args:
        base: existing directory on a local disk.
        chosen: the Apptainer that drivers would use; None for the default.
    """
    try:
        program = find_apptainer(chosen)
        setuid = uses_setuid(program)
        problem = _try_start(program, base, setuid=setuid)
    except SandboxError as error:
        problem = error
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = SandboxError(f"cannot be tried in {base}: {error}")
    if problem is not None:
        return Check(name=_NAME, ok=False, found=problem.message, remedy=problem.hint)
    how = "by its setuid program, without user namespaces" if setuid else "in a user namespace of its own"
    return Check(name=_NAME, ok=True, found=f"works, {how}")


def _try_start(program: Path, base: Path, *, setuid: bool) -> SandboxError | None:
    spec = SandboxSpec()
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        root = Path(scratch)
        files = InstanceFiles(
            root, root / "empty", runtime=root / "empty", empty=root / "empty", blank=root / "hosts"
        )
        for folder in (files.empty, files.work, files.tmp, files.home):
            folder.mkdir()
        write_names(root, spec.hostname)
        (files.empty / "hosts").touch()
        (files.empty / "hostname").touch()
        write_system(spec, files)
        command = apptainer_command(program, spec, files, setuid=setuid, root=os.geteuid() == 0)
        done = subprocess.run(
            [*command, "/bin/sh", "-c", _LOOK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=wrapper_environment(root, {}),
            cwd="/",
            timeout=_TIMEOUT_S,
            check=False,
        )
    if done.returncode != 0:
        return explain_instance(done.stdout + done.stderr)
    number, *interfaces = done.stdout.split()
    separate = {"pid": number == "1", "net": interfaces == ["lo"]}
    shared = [name for name, is_separate in separate.items() if not is_separate]
    return explain_shared(shared) if shared else None
