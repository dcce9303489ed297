"""NeMo Gym's command line with our environments, for tests."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from prorl_envs.nemo.root import GymRoot, gym_root
from prorl_envs.nemo.rows import server_name
from tests.nemo.conftest import SERVICE_TOKEN
from tests.packages import install

CHECKOUT = Path(__file__).resolve().parents[2]
SCAFFOLD = CHECKOUT / "prorl_envs" / "cli" / "scaffold"
SITE = Path(sysconfig.get_path("purelib"))
GYM = Path(sys.executable).with_name("gym")
#: Set by scripts/nemo-examples.sh: the example files are rewritten, not compared.
RECORDING = bool(os.environ.get("RECORD_EXAMPLES"))
#: 0.7 has environment servers and schemas of tasks.
HAS_ENVIRONMENT_SERVERS = (SITE / "environment_servers" / "single_agent_turn_legacy").is_dir()
#: 0.7 has manifests and commands for them.
HAS_MANIFESTS = (SITE / "nemo_gym" / "environment" / "manifest.py").is_file()


def prepared_root(path: Path, packages: Sequence[Path] = ()) -> GymRoot:
    """Make a root with these packages of environments installed into it."""
    if packages:
        install(path, *packages)
    return gym_root(path)


def gym(root: GymRoot, *arguments: str, within: str = ".") -> subprocess.CompletedProcess[str]:
    """Run `gym` in the root, or in a folder of it."""
    return subprocess.run(
        [str(GYM), *arguments],
        cwd=root.path / within,
        env=environment(root),
        capture_output=True,
        text=True,
        check=False,
    )


def environment(root: GymRoot) -> Mapping[str, str]:
    """Return the environment of NeMo Gym's processes. Ray's sockets need a short path of their own."""
    # NeMo Gym calls uv, which has to find the running interpreter.
    programs = [str(GYM.parent), str(Path(sys.base_prefix) / "bin"), os.environ["PATH"]]
    own = {
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(root.path / "r"),
        "PRORL_SERVER__TOKEN": SERVICE_TOKEN,
        "PYTHONPATH": str(root.path),
        "PATH": os.pathsep.join(programs),
        "NEMO_GYM_EXTRA_ROOTS": str(root.path),
    }
    return os.environ | own


def server_folder(root: GymRoot, name: str) -> Path:
    """Return the folder of a family's server, where its package is installed."""
    below = Path("resources_servers") / server_name(name)
    local = root.path / below
    return local if (local / "app.py").is_file() else SITE / below
