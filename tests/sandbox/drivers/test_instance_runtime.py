"""The Python that `apptainer-instance` copies into sandboxes, without Apptainer."""

import json
import subprocess
from pathlib import Path

from prorl_envs.sandbox.drivers.instance.runtime import CODE, PLACE, copy_runtime
from prorl_envs.sandbox.drivers.probe import find_bwrap
from prorl_envs.sandbox.template.template import TEMPLATES

IMPORT = "import importlib, json, sys; sys.path.append(sys.argv[1])\nfor name in json.loads(sys.argv[2]): "


def test_it_has_all_that_the_first_process_imports(tmp_path: Path) -> None:
    runtime = copy_runtime(tmp_path / "runtime", TEMPLATES)
    modules = ["prorl_envs.sandbox.template.zygote", *runtime.modules]
    modules += [entry.partition(":")[0] for spec in TEMPLATES.values() for entry in spec.entries]
    command = runtime.command()
    program = [*command[: command.index("-c")], "-c", f"{IMPORT}importlib.import_module(name)"]
    alone = [str(find_bwrap()), "--unshare-all", "--ro-bind", str(runtime.path), PLACE, "--proc", "/proc"]
    done = subprocess.run(
        [*alone, "--dev", "/dev", "--", *program, CODE, json.dumps(modules)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
