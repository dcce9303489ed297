"""The batch script for Slurm, with its service, a node and a run. `srun` and `scancel` are replaced: they
start and stop the command on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_envs.rollout.client.result_files import read_results
from tests.cli.test_scripted import scripted
from tests.docs.blocks import ROOT
from tests.support.vllm_server import free_port

SRUN = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
echo $$ > "$STEP"
export SLURMD_NODENAME=node-of-slurm
exec "$@"
"""
SCANCEL = """\
#!/bin/sh
kill -TERM "$(cat "$STEP")"
"""


@pytest.mark.thorough
def test_the_batch_script_runs_a_client_on_a_service_with_nodes(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scancel", SCANCEL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with scripted(tmp_path, "bash") as (_, [_, url, _, tokenizer]):
        (tmp_path / "settings.yaml").write_text(
            f"model: {{servers: [{url}], tokenizer: {tokenizer}}}\n"
            "nodes: {run_on_head: false}\nservice: {store: service.db}\n"
        )
        run = 'prorl-envs run bash --service "$ROLLOUTS" --limit 1 --samples 2 --out out'
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "STEP": str(tmp_path / "step"),
            "SLURM_JOB_ID": str(free_port() // 2 % 10_000),
            "ROLLOUTS_VENV": sys.prefix,
            "ROLLOUTS_CONFIG": "settings.yaml",
        }
        done = subprocess.run(
            ["bash", ROOT / "examples/slurm/rollouts.sbatch", "sh", "-c", run],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [one.reward for one in read_results(tmp_path / "out")] == [1.0, 1.0]
    assert "joined" in done.stderr
