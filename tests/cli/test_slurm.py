"""The batch script for Slurm, with its Ray cluster, service, node and a run. Replacements of `srun` and
`ray symmetric-run` start the command on this machine."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_envs.extras import install_extras
from prorl_envs.rollout.client.result_files import read_results
from tests.cli.test_scripted import scripted
from tests.docs.blocks import ROOT
from tests.support.vllm_server import free_port

SRUN = """\
#!/bin/sh
exec "$@"
"""
# `ray symmetric-run` on the first machine, without `ray stop`, which would stop other clusters here.
RAY = """\
#!/bin/bash
set -e
address=$3
temp=$6
shift 9
"$RAY" start --head --block --node-ip-address="${address%:*}" --port="${address##*:}" \
    "$temp" --include-dashboard=false --num-cpus=2 --resources='{"prorl": 2}' >/dev/null &
cluster=$!
until "$RAY" status --address "$address" >/dev/null 2>&1; do sleep 1; done
status=0
"$@" || status=$?
kill "$cluster"
wait "$cluster" || true
exit "$status"
"""


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=install_extras("ray"))
def test_the_batch_script_runs_a_client_on_a_service_with_nodes(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("ray", RAY)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "prorl-envs").symlink_to(Path(sys.prefix, "bin", "prorl-envs"))
    with scripted(tmp_path, "bash") as (_, [_, url, _, tokenizer]):
        (tmp_path / "settings.yaml").write_text(
            f"model: {{servers: [{url}], tokenizer: {tokenizer}}}\n"
            "nodes: {run_on_head: false}\nservice: {store: service.db}\n"
        )
        run = 'prorl-envs run bash --service "$ROLLOUTS" --limit 1 --samples 2 --out out'
        environment = {
            **os.environ,
            "RAY": str(Path(sys.prefix, "bin", "ray")),
            "SLURM_JOB_ID": str(free_port() // 2 % 10_000),
            "ROLLOUTS_VENV": str(tmp_path),
            "ROLLOUTS_CONFIG": "settings.yaml",
        }
        done = subprocess.run(
            ["bash", ROOT / "examples/slurm/rollouts.sbatch", "sh", "-c", run],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [one.reward for one in read_results(tmp_path / "out")] == [1.0, 1.0]
    assert "machines of the Ray cluster" in done.stderr
