"""Tests of snapshots of an episode: files, shells, Python's memory and the conversation go on from them."""

import json
from typing import Any

import pytest
from gymnasium.error import ResetNeeded

from prorl_envs.env.runner import Runner
from prorl_envs.gym.env import TaskEnv

BASH_TASK = {
    "id": "sum",
    "instruction": "Write 6 into result.txt",
    "files": {"a.txt": "1\n"},
    "checks": [{"type": "file_equals", "path": "result.txt", "text": "6\n"}],
}


def bash(env: TaskEnv, command: str) -> str:
    call = {"name": "bash", "arguments": {"command": command}}
    return env.step(json.dumps(call))[0].strip()


def python(env: TaskEnv, code: str) -> str:
    return env.step(json.dumps({"name": "ipython", "arguments": {"code": code}}))[0].strip()


def go_on(env: TaskEnv) -> None:
    """Restore the episode from a snapshot of it."""
    snapshot = env.snapshot()
    env.restore(snapshot)
    snapshot.close()


def finish(env: TaskEnv, **arguments: Any) -> float:
    return env.step(json.dumps({"name": "finish", "arguments": arguments}))[1]


def test_an_episode_goes_on_from_a_snapshot_as_often_as_wanted(runner: Runner) -> None:
    env = TaskEnv("bash", tasks=[BASH_TASK], runner=runner, render_mode="ansi")
    env.reset()
    bash(
        env,
        "mkdir d; cd d; x=3; echo before > ../kept; rm ../a.txt; twice() { echo $(($1 * 2)); }; false",
    )
    snapshot = env.snapshot()
    rendered = env.render()
    for _ in range(2):
        assert (
            bash(env, "echo $?; pwd; twice $x; cat ../kept; echo ../*")
            == "1\n/workspace/d\n6\nbefore\n../d ../kept"
        )
        bash(env, "echo changed > ../kept; x=4; cd /; rm -r /workspace/d; echo 5 > /workspace/result.txt")
        assert bash(env, "cd /workspace; cat kept; echo *") == "changed\nkept result.txt"
        info = env.restore(snapshot)
        assert info["lost"] == []
        assert info["turn"] == 1
        assert env.render() == rendered
    assert bash(env, "twice $x > ../result.txt; find /tmp -mindepth 1") == ""
    assert finish(env) == 1.0
    snapshot.close()
    env.close()


def test_branches_and_their_parent_see_nothing_of_each_other(runner: Runner) -> None:
    parent = TaskEnv("ipython", runner=runner)
    parent.reset(seed=1)
    python(parent, "import itertools\nnumbers = itertools.count(); next(numbers); table = {'a': [1]}")
    snapshot = parent.snapshot()
    branches = [TaskEnv("ipython", runner=runner) for _ in range(3)]
    for index, branch in enumerate(branches):
        branch.restore(snapshot)
        python(branch, f"table['a'].append({index}); open('mark', 'w').write('{index}')")
    python(parent, "table['a'].append('parent')")
    snapshot.close()
    for index, branch in enumerate(branches):
        assert (
            python(branch, "print(next(numbers), table, open('mark').read())")
            == f"1 {{'a': [1, {index}]}} {index}"
        )
    assert (
        python(parent, "import os; print(next(numbers), table, os.listdir())") == "1 {'a': [1, 'parent']} []"
    )
    for env in (parent, *branches):
        env.close()


def test_a_mapping_longer_than_its_file_is_restored(runner: Runner) -> None:
    env = TaskEnv("ipython", runner=runner)
    env.reset(seed=1)
    code = (
        "import ctypes, mmap, os\nfd = os.open('f', os.O_RDWR | os.O_CREAT); os.write(fd, b'a' * 5000)\n"
        "libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n"
        "private = [libc.mmap(None, size, 3, mmap.MAP_PRIVATE, fd, start)\n"
        "           for size, start in ((8192, 0), (1 << 20, 0), (8192, 1 << 20))]\n"
        "os.close(fd); ctypes.memset(private[1], ord('b'), 3); os.remove('f')"
    )
    assert python(env, code) == ""
    go_on(env)
    shown = (
        "print([ctypes.string_at(place, 5) for place in private[:2]], ctypes.string_at(private[1] + 4999, 2))"
    )
    assert python(env, shown) == r"[b'aaaaa', b'bbbaa'] b'a\x00'"
    env.close()


def test_memory_beside_a_guard_is_restored(runner: Runner) -> None:
    """The C library of 2025 has such guards in the stacks of threads."""
    env = TaskEnv("ipython", runner=runner)
    env.reset(seed=1)
    code = (
        "import ctypes, mmap\nlibc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n"
        "place = libc.mmap(None, 12288, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)\n"
        "for page in range(3): ctypes.memset(place + page * 4096, ord('a') + page, 4096)\n"
        "libc.madvise(ctypes.c_void_p(place + 4096), 4096, 102)"  # MADV_GUARD_INSTALL, Linux 6.13
    )
    if (refused := python(env, code)) != "0":
        pytest.skip(f"this kernel has no guards: {refused}")
    go_on(env)
    shown = "print(ctypes.string_at(place, 4096)[-3:], ctypes.string_at(place + 8192, 4096)[-3:])"
    assert python(env, shown) == "b'aaa' b'ccc'"
    env.close()


def test_a_chain_of_snapshots(runner: Runner) -> None:
    env = TaskEnv("ipython", runner=runner)
    env.reset(seed=1)
    python(env, "values = []")
    for number in range(12):
        python(env, f"values.append({number}); open('f{number}', 'w').write('x' * {number})")
        go_on(env)
    assert python(env, "import os; print(values == list(range(12)), len(os.listdir()))") == "True 12"
    env.close()


def test_layers_of_many_snapshots_are_merged(runner: Runner) -> None:
    env = TaskEnv("bash", tasks=[BASH_TASK], runner=runner, max_turns=100)
    env.reset()
    bash(env, "mkdir d; echo old > d/old; ln -s d link")
    for number in range(40):
        change = f"echo {number} > f{number}; rm -f f{number - 3}; rm -r d; mkdir d; echo {number} > d/new"
        bash(env, change)
        snapshot = env.snapshot()
        if number % 4 == 0:
            env.restore(snapshot)
        snapshot.close()
    found = bash(env, "echo $(ls -A); cat f37 f38 f39; echo $(ls -A d); cat link/new")
    assert found == "a.txt d f37 f38 f39 link\n37\n38\n39\nnew\n39"
    env.close()


def test_programs_that_start_others_all_the_time_are_stopped(runner: Runner) -> None:
    env = TaskEnv("bash", tasks=[BASH_TASK], runner=runner)
    env.reset()
    lines = r'import subprocess\nwhile True: subprocess.run(["true"])\n'
    bash(env, f"printf '{lines}' > /tmp/loop.py; for _ in 1 2; do python3 /tmp/loop.py & done; echo")
    for _ in range(5):
        snapshot = env.snapshot()
        assert any("loop.py" in lost for lost in snapshot.checkpoint.lost)
        snapshot.close()
    assert bash(env, "jobs -r | wc -l") == "2"
    env.close()


def test_a_file_open_for_writing_is_copied(runner: Runner) -> None:
    env = TaskEnv("bash", tasks=[BASH_TASK], runner=runner)
    env.reset()
    bash(env, "exec 7>log; echo one >&7; sleep 100 & echo")
    snapshot = env.snapshot()
    assert "log" in " ".join(snapshot.checkpoint.sandbox.copied)
    assert any("sleep 100" in lost for lost in snapshot.checkpoint.lost)
    assert bash(env, "echo two >&7; cat log") == "one\ntwo"
    env.restore(snapshot)
    assert bash(env, "cat log") == "one"
    snapshot.close()
    env.close()


def test_no_snapshot_without_an_episode(runner: Runner) -> None:
    env = TaskEnv("bash", tasks=[BASH_TASK], runner=runner)
    with pytest.raises(ResetNeeded):
        env.snapshot()
    env.close()


def test_the_end_of_a_snapshots_mounts_does_not_write_out_the_file_system(runner: Runner) -> None:
    env = TaskEnv("bash", tasks=[BASH_TASK], runner=runner)
    env.reset()
    env.snapshot().close()
    mount = bash(env, "grep ' /workspace overlay ' /proc/mounts")
    env.close()
    assert {"volatile", "fsync=volatile"} & set(mount.split()[3].split(",")), mount
