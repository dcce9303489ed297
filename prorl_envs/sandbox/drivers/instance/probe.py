"""Check whether Apptainer alone can start sandboxes, on machines whose namespaces cannot be joined."""

import os
import tempfile
from pathlib import Path

from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.apptainer_probe import find_apptainer, uses_setuid
from prorl_envs.sandbox.drivers.apptainer_wrapper import run_apptainer
from prorl_envs.sandbox.drivers.instance.command import (
    InstanceFiles,
    apptainer_command,
    explain_instance,
    explain_shared,
    write_system,
)
from prorl_envs.sandbox.drivers.probe import Check, tried
from prorl_envs.sandbox.filesystem.host_system import write_names

_TIMEOUT_S = 60.0
_NAME = "an Apptainer each"
_BY_SETUID = "by its setuid program, without user namespaces"
_BY_USER_NAMESPACE = "in a user namespace of its own"
#: Prints its pid (1 in a new pid namespace), and its network interfaces.
_LOOK = "echo $$; while read -r name rest; do case $name in *:) echo ${name%:};; esac; done < /proc/net/dev"


def instance_check(base: Path, chosen: Path | None = None) -> Check:
    """Check whether a sandbox starts as `InstanceDriver` starts it: see `try_instance`."""
    return tried(_NAME, lambda: try_instance(base, chosen))


def try_instance(base: Path, chosen: Path | None = None) -> str:
    """Start a sandbox as `InstanceDriver` does, below `base`: see `tried`. Blocks, for some 300 ms.

    Args:
        base: existing directory on a local disk.
        chosen: the Apptainer that drivers would use; None for the default.
    """
    program = find_apptainer(chosen)
    setuid = uses_setuid(program)
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
        done = run_apptainer([*command, "/bin/sh", "-c", _LOOK], root, timeout_s=_TIMEOUT_S)
    if done.returncode != 0:
        raise explain_instance(done.stdout + done.stderr)
    number, *interfaces = done.stdout.split()
    separate = {"pid": number == "1", "net": interfaces == ["lo"]}
    if shared := [name for name, is_separate in separate.items() if not is_separate]:
        raise explain_shared(shared)
    return f"works, {_BY_SETUID if setuid else _BY_USER_NAMESPACE}"
