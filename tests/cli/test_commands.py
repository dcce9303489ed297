"""Commands without a test module of their own, and the format of errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from prorl_envs.cli.commands.doctor import doctor
from prorl_envs.cli.commands.play import parse_line
from prorl_envs.cli.commands.show import render
from prorl_envs.cli.output.console import plain
from prorl_envs.config import Settings
from prorl_envs.errors import FailureKind, InputError
from prorl_envs.extras import install_extras
from prorl_envs.model.types import VersionSpan
from prorl_envs.rollout.api.types import Failure, JobState, Result, Stage, Timings, Trajectory, TurnRecord
from prorl_envs.tools.schemas import BASH, EDITOR, FINISH
from tests.cli.conftest import SCRIPT, Cli
from tests.support.kernel import ROW, write_kernel_files


def result(job: str = "g/0", **changes: object) -> Result:
    turn = TurnRecord(
        start=2, end=4, finish_reason="stop", weight_version="7", server="s", model_s=0.5, tools_s=0.25
    )
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    call = {"id": "c", "type": "function", "function": function}
    fields: dict[str, object] = {
        "job_id": job, "group_id": "g", "sample": 0, "environment": "bash", "task_id": "t",
        "state": JobState.DONE, "reward": 1.0, "mask_sample": False, "stop_reason": "finished",
        "failure": None, "timings": Timings(init_s=0.1),
        "trajectory": Trajectory(
            ids=[1, 2, 3, 4], loss_mask=[0, 0, 1, 1], logprobs=[0, 0, -1, -2], turns=[turn]
        ),
        "messages": [
            {"role": "user", "content": "List the files."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "\x1b[31mred\x1b[0m [bold]not markup[/bold]", "tool_call_id": "c"},
        ],
        "evidence": {"checks": [{"name": "files", "passed": True}]},
    }  # fmt: skip
    return Result.model_validate(fields | changes)


def written(path: Path, *results: Result) -> str:
    path.write_text("".join(r.model_dump_json() + "\n" for r in results))
    return str(path)


def shown(one: Result) -> str:
    console = Console(width=100, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    with console.file:
        console.print(render(one))
    return console.export_text()


def test_show_renders_a_conversation(cli: Cli, tmp_path: Path) -> None:
    done = cli("show", written(tmp_path / "r.jsonl", result()))
    assert done.returncode == 0, done.stderr
    for part in ("List the files.", "call bash", "command: ls", "evidence", "drift 0", '"passed": true'):
        assert part in done.stdout


def test_show_names_the_weights_of_all_turns() -> None:
    one = result()
    assert re.search(r"weights +7 *\n", shown(one))
    assert one.trajectory is not None
    spans = [VersionSpan(start=0, end=1, version="7"), VersionSpan(start=1, end=2, version="8")]
    turn = one.trajectory.turns[0].model_copy(update={"version_spans": spans})
    changed = one.trajectory.model_copy(update={"turns": [turn]})
    assert re.search(r"weights +7, 8 *\n", shown(result(trajectory=changed)))


def test_show_neutralises_hostile_text() -> None:
    text = shown(result())
    assert "\x1b" not in text and "\\x1b[31mred" in text and "[bold]not markup[/bold]" in text


def test_show_explains_a_failure() -> None:
    failure = Failure(kind=FailureKind.GRADER, stage=Stage.EVAL, message="no verdict", hint="look there")
    text = shown(result(state=JobState.FAILED, reward=None, mask_sample=True, failure=failure))
    assert "grader in eval: no verdict" in text and "look there" in text


def test_show_lists_and_selects(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", result("g/0"), result("g/1", reward=0.0))
    assert "g/1" in cli("show", path).stdout
    assert "job      g/1" in cli("show", path, "/1").stdout
    missing = cli("show", path, "g/7")
    assert missing.returncode == 2 and "no result of" in missing.stderr and "hint:" in missing.stderr


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{}", "job_id"),
        ("not json", "r.jsonl:1"),
        (json.dumps({"version": 9}), "version"),
        ("\udcff", "r.jsonl:1"),
    ],
)
def test_a_bad_line_is_named(cli: Cli, tmp_path: Path, line: str, word: str) -> None:
    (tmp_path / "r.jsonl").write_bytes(line.encode("utf-8", "surrogateescape") + b"\n")
    done = cli("show", "r.jsonl")
    assert done.returncode == 2 and word in done.stderr and "Traceback" not in done.stderr


def test_doctor_prints_the_same_for_machines(cli: Cli) -> None:
    done = cli("doctor", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["fit"] and told["machine"]["prorl-envs"]
    sandbox = next(check for check in told["checks"] if check["name"] == "sandbox")
    assert sandbox["ok"] and sandbox["needed"]


@pytest.mark.anyio
async def test_a_family_that_lacks_packages_is_optional(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prorl_envs.envs.math.env._PACKAGES", ("no_such_library",))
    assert await doctor(Settings(), as_json=True)
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert not checks["math"]["ok"] and not checks["math"]["needed"]
    assert install_extras("data", "math") in checks["math"]["found"]
    assert checks["bash"]["ok"] and checks["bash"]["needed"]


@pytest.mark.anyio
async def test_tasks_do_not_run_if_no_sandbox_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (1000, 1000))
    assert not await doctor(Settings(), as_json=True)
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "no more than 1000 files" in checks["sandbox"]["found"] and "bash" not in checks


def test_the_driver_can_be_chosen(cli: Cli) -> None:
    done = cli("--driver", "local", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NO ISOLATION" in done.stdout and "isolates nothing" in done.stderr
    assert "starts and answers" in done.stdout
    done = cli("--driver", "docker", "doctor")
    assert done.returncode == 2 and "setting driver" in done.stderr and "'apptainer'" in done.stderr


def test_play_lets_a_person_solve_a_task(cli: Cli) -> None:
    done = cli("play", "bash", "greeting", stdin="echo 'hello, world' > greeting.txt\n/nonsense\n/finish\n")
    assert done.returncode == 0, done.stderr
    assert "reward 1" in done.stdout and "no tool is called 'nonsense'" in done.stderr


def test_play_accepts_several_lines_at_once(cli: Cli) -> None:
    cell = '"""\ndef answer():\n    return 454396537\n\nprint({"sum": answer()})\n"""\n/finish 454396537\n'
    done = cli("play", "ipython", "prime-sum", stdin=cell)
    assert done.returncode == 0, done.stderr
    assert "{'sum': 454396537}" in done.stdout and "reward 1" in done.stdout


def test_play_shows_how_to_attach_a_jupyter_client(cli: Cli, tmp_path: Path) -> None:
    settings, data = write_kernel_files(tmp_path)
    code = ROW["reference"][0]["arguments"]["code"]
    typed = f"/jupyter\n{code}\n/finish\n"
    done = cli("play", "kernel", "--config", str(settings), "--data", str(data), stdin=typed)
    assert done.returncode == 0, done.stderr
    assert "jupyter console --existing /" in done.stdout and "reward 1" in done.stdout
    done = cli("play", "ipython", "prime-sum", stdin="/jupyter\n")
    assert "this toolbox has no Jupyter kernel" in done.stderr and "python: kernel" in done.stderr


def test_play_reads_a_file(tmp_path: Path) -> None:
    """A regular file and /dev/null cannot be polled."""
    (tmp_path / "typed").write_text("echo 'hello, world' > greeting.txt\n/finish\n")
    for name, shown in ((str(tmp_path / "typed"), "reward 1"), (os.devnull, "")):
        with open(name) as stdin:  # noqa: PTH123 - os.devnull is no Path
            done = subprocess.run(
                [SCRIPT, "play", "bash", "greeting"],
                stdin=stdin, capture_output=True, text=True, timeout=100, check=False,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout and "Traceback" not in done.stderr


def test_play_stops_with_its_input(cli: Cli) -> None:
    done = cli("play", "bash", "greeting", stdin="ls\n")
    assert done.returncode == 0 and "reward" not in done.stdout


def test_validate_reports_whether_tasks_discriminate(cli: Cli, tmp_path: Path) -> None:
    row = {
        "id": "trivial", "instruction": "Do nothing.",
        "checks": [{"type": "command", "name": "c", "command": "true"}],
        "reference": [{"tool": "finish", "arguments": {}}],
    }  # fmt: skip
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    done = cli("validate", "bash", "tasks.jsonl")
    assert done.returncode == 1 and "the untouched workspace scores 1" in " ".join(done.stdout.split())


def test_prepare_reports_prepared_data(cli: Cli, tmp_path: Path) -> None:
    checks = [{"type": "command", "name": "c", "command": "true"}]
    row = {"id": "one", "instruction": "Do nothing.", "checks": checks, "reference": []}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    done = cli("prepare", "bash", "tasks.jsonl")
    assert done.returncode == 0 and "was there" in done.stdout and "1 was there" in done.stderr


@pytest.mark.parametrize("command", ["validate", "prepare"])
def test_tasks_that_cannot_run_here_are_a_failure_unless_allowed(
    cli: Cli, tmp_path: Path, command: str
) -> None:
    checks = [{"type": "file_equals", "name": "x", "path": "x", "text": "x"}]
    reference = [{"tool": "bash", "arguments": {"command": "printf x > x"}}]
    good = {"id": "good", "instruction": "Write x.", "checks": checks, "reference": reference}
    lacking = {**good, "requires": ["no-such-program"]}
    rows = [good, *({**lacking, "id": f"lacking-{number}"} for number in range(5))]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = cli(command, "bash", "tasks.jsonl")
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("left out: ")]
    assert line.startswith("left out: lacking-0, lacking-1, lacking-2 and 2 more: not installed below /usr")
    assert cli(command, "bash", "tasks.jsonl", "--allow-missing").returncode == 0


def test_prepare_leaves_out_the_tasks_that_the_driver_cannot_run(cli: Cli) -> None:
    done = cli("--driver", "local", "prepare", "bash")
    assert done.returncode == 1 and "12 left out" in done.stderr
    assert "bash tasks need isolated sandboxes" in done.stderr


def test_an_unknown_environment_is_a_clear_error(cli: Cli) -> None:
    done = cli("run", "chess", "--llm", "http://127.0.0.1:9")
    assert done.returncode == 2 and "chess" in done.stderr and "bash" in done.stderr


def test_parse_line() -> None:
    tools = [BASH, EDITOR, FINISH]
    assert parse_line("ls -l", tools, 1).arguments == {"command": "ls -l"}
    call = parse_line('/str_replace_editor {"command": "view", "path": "/x"}', tools, 2)
    assert (call.name, call.arguments["path"]) == ("str_replace_editor", "/x")
    for command in ("/usr/bin/env true", "{ echo a; echo b; }"):
        assert parse_line(command, tools, 3).arguments == {"command": command}
    assert parse_line('/bash """\na\n  b\n"""', tools, 3).arguments == {"command": "a\n  b"}
    with pytest.raises(InputError, match="no tool"):
        parse_line("/rm x", tools, 3)
    with pytest.raises(InputError, match="not JSON"):
        parse_line("/bash {nope", tools, 4)


def test_plain_text_keeps_only_printable_characters_and_line_ends() -> None:
    assert plain("a\tb\nc\x07\x9b31m\u202e").plain == "a\tb\nc\\x07\\x9b31m\\x202e"


def test_help_and_completion_import_little_of_the_package() -> None:
    script = "import sys, prorl_envs.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"asyncio", "pydantic", "yaml", "prorl_envs.config"} & set(done.stdout.split())
