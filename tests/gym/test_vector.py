"""Vectors of environments, and the registration of the ids."""

import errno
import json
import subprocess
import sys
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import prorl_envs.gym  # noqa: F401 - registers the ids
from prorl_envs.errors import InputError
from prorl_envs.gym.registration import IDS, register
from prorl_envs.gym.vector import TaskVectorEnv
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapSandbox

ROW = {
    "id": "t",
    "instruction": "Remove f.",
    "files": {"f": "x"},
    "checks": [{"type": "file_absent", "path": "f"}],
}
#: A row whose episodes cannot be graded: a failing member beside a working one.
BROKEN = {**ROW, "id": "broken", "checks": [{"type": "file_matches", "path": "f", "pattern": "("}]}
REMOVE = json.dumps({"name": "bash", "arguments": {"command": "rm -f f"}})
TRUE = json.dumps({"name": "bash", "arguments": {"command": "true"}})
FINISH = json.dumps({"name": "finish", "arguments": {}})


def make(row: dict[str, Any]) -> Any:
    # With the module: a new process that is not a fork has not imported it (from Python 3.14 on, by default).
    return lambda: gymnasium.make("prorl_envs.gym:prorl/Bash-v0", tasks=[row])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_failing_member_does_not_stop_the_vector(kind: str) -> None:
    members = [make(ROW), make(BROKEN), make(ROW)]
    envs = SyncVectorEnv(members) if kind == "sync" else AsyncVectorEnv(members, shared_memory=False)
    observations, _ = envs.reset(seed=1)
    assert all("Remove f." in text for text in observations)
    envs.step((REMOVE, TRUE, TRUE))
    _, rewards, terminated, truncated, infos = envs.step((FINISH,) * 3)
    assert list(rewards) == [1.0, 0.0, 0.0]
    assert list(terminated) == [True, False, True]
    assert list(truncated) == [False, True, False]
    assert list(infos["_error"]) == [False, True, False]
    assert infos["error"]["kind"][1] == "grader"
    observations, _, terminated, truncated, _ = envs.step((TRUE,) * 3)  # the step that resets
    assert all("Remove f." in text for text in observations)
    assert not any(terminated) and not any(truncated)
    _, rewards, *_ = envs.step((REMOVE, REMOVE, REMOVE))
    _, rewards, *_ = envs.step((FINISH,) * 3)
    assert list(rewards) == [1.0, 0.0, 1.0]
    envs.close()


def test_each_member_of_a_vector_reports_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(sandbox: BubblewrapSandbox) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BubblewrapSandbox, "_prepare_files", no_space)
    envs = gymnasium.make_vec("prorl/Bash-v0", num_envs=3, vectorization_mode="sync")
    assert isinstance(envs, SyncVectorEnv)
    envs.reset(seed=1)
    _, _, _, truncated, infos = envs.step((TRUE,) * 3)
    assert truncated.tolist() == [True] * 3 and infos["error"]["kind"].tolist() == ["sandbox"] * 3
    for number, failure in enumerate(envs.get_attr("failure")):
        assert isinstance(failure.__cause__, OSError), failure
        [cause, *_] = infos["error"]["causes"][number]
        assert cause == f"{type(failure.__cause__).__name__}: {failure.__cause__}"
    envs.close()


def test_errors_of_several_members_are_all_named() -> None:
    envs = TaskVectorEnv(3, "bash")
    with pytest.raises(InputError, match="unknown options") as caught:
        envs.reset(options={"tsak": "t"})
    assert [note.split(":")[0] for note in caught.value.__notes__] == [
        "member 1 also failed", "member 2 also failed",
    ]  # fmt: skip
    envs.close()


def test_make_vec() -> None:
    envs = gymnasium.make_vec(
        "prorl/Bash-v0", num_envs=2, vectorization_mode="async", vector_kwargs={"shared_memory": False}
    )
    observations, infos = envs.reset(seed=1)
    assert len(observations) == 2
    assert infos["task_id"].shape == (2,)
    envs.close()


SLEEP = json.dumps({"name": "bash", "arguments": {"command": "sleep 100"}})
DIE = json.dumps({"name": "bash", "arguments": {"command": "kill -9 -1"}})


def test_members_do_not_affect_each_other() -> None:
    """The grader of one member fails, another member takes too long; the other members step as usual."""
    envs = gymnasium.make_vec("prorl/Bash-v0", num_envs=3, tasks=[ROW], render_mode="ansi", step_timeout_s=20)
    assert isinstance(envs, TaskVectorEnv)
    observations, infos = envs.reset(seed=1)
    assert observations in envs.observation_space and infos["task_id"].tolist() == ["t"] * 3
    envs.step((REMOVE, REMOVE, TRUE))
    envs._members[1]._step_timeout_s = 0.5
    _, rewards, terminated, truncated, infos = envs.step((FINISH, SLEEP, TRUE))
    assert (rewards.tolist(), terminated.tolist()) == ([1.0, 0.0, 0.0], [True, False, False])
    assert truncated.tolist() == [False, True, False] == infos["_error"].tolist()
    assert infos["error"]["kind"][1] == "timeout" and infos["mask_sample"].tolist() == [False, True, False]
    envs._members[1]._step_timeout_s = 20
    observations, _, terminated, truncated, _ = envs.step((TRUE, TRUE, REMOVE))  # the step that resets two
    assert ["Remove f." in text for text in observations] == [True, True, False]
    assert not terminated.any() and not truncated.any()
    envs.step((DIE, REMOVE, TRUE))
    _, rewards, terminated, *_ = envs.step((REMOVE, FINISH, FINISH))
    assert rewards.tolist()[1:] == [1.0, 1.0] and terminated.tolist()[1:] == [True, True]
    assert "> " + REMOVE in str(envs.render()[1])
    envs.close()
    with pytest.raises(InputError, match="2 actions for 1"):
        TaskVectorEnv(1, "bash").step(("", ""))


def test_making_by_module_and_id_registers() -> None:
    program = (
        "import sys, gymnasium; assert not any(i.startswith('prorl/') for i in gymnasium.registry);"
        "gymnasium.make('prorl_envs.gym:prorl/Bash-v0').close()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_registering_imports_no_family() -> None:
    program = (
        "import sys, prorl_envs.gym;"
        "sys.exit(any(name.startswith(('prorl_envs.env', 'prorl_envs.tools')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-W", "error", "-c", program], check=False).returncode == 0


def test_importing_registers_and_a_second_import_changes_nothing() -> None:
    program = (
        "import gymnasium; gymnasium.registry.clear(); import importlib, prorl_envs.gym as g;"
        "importlib.reload(g); print(*sorted(gymnasium.registry))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == sorted(IDS)
    register()
    assert gymnasium.spec("prorl/Bash-v0").nondeterministic
