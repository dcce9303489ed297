"""Jobs beside attackers have the right rewards and no failures. The bench measures their duration."""

from pathlib import Path

import pytest

from bench.attacked import measure, parser, summary
from prorl_envs.cli.run_loop import run


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_jobs_beside_attackers_get_the_right_rewards(run_dir: Path) -> None:
    options = parser().parse_args(["--jobs", "4", "--each", "2", "--rounds", "1", "--driver", "bubblewrap"])
    found = summary(*run(measure(options, run_dir)))
    assert found.jobs == 8
    assert (found.wrong, found.failed) == (0, 0)
