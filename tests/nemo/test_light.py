"""Even with NeMo Gym installed, only its servers and the provider import it."""

import subprocess
import sys

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

pytestmark = pytest.mark.nemo

PROGRAM = """
import importlib, pkgutil, sys
import prorl_envs
NEMO = (".nemo.agent", ".nemo.environment_server", ".nemo.fixture", ".nemo.rollouts", ".nemo.server")
NEMO += (".nemo.wire", ".nemo.provider")
for module in pkgutil.walk_packages(prorl_envs.__path__, "prorl_envs."):
    if not module.name.endswith((*NEMO, ".app.ray", ".app")):
        importlib.import_module(module.name)
heavy = {"nemo_gym", "ray", "torch", "transformers"} & {name.partition(".")[0] for name in sys.modules}
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


def test_importing_everything_else_imports_no_nemo_gym() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
