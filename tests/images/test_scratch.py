"""Scratch directories of builds that run at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prorl_envs.images.scratch import make_scratch
from prorl_envs.images.supervisor import remove


def test_builds_may_end_while_others_begin(tmp_path: Path) -> None:
    def build(_: int) -> None:
        for _ in range(200):
            remove(make_scratch(tmp_path))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(build, range(4))) == [None] * 4
    assert not list(tmp_path.iterdir())
