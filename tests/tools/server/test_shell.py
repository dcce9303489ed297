"""Promises of the persistent shell, on real sandboxes."""

import asyncio
import json

import pytest

from prorl_envs.errors import InputError
from prorl_envs.tools.client.toolbox import Toolbox
from tests.tools.conftest import HASTY
from tests.tools.deadlines import at_deadline

pytestmark = pytest.mark.anyio
T = 60.0


async def test_the_output_is_exactly_the_written_text(box: Toolbox) -> None:
    result = await box.bash(r"printf 'a\tb\n  c'", timeout_s=T)
    assert result.text == "a\tb\n  c"
    assert result.ok
    assert result.data == {"exit_code": 0, "cwd": "/workspace", "timed_out": False, "waiting": False}


async def test_variables_functions_options_and_directory_persist(box: Toolbox) -> None:
    await box.bash("x=5; export Y=6; f() { echo f$1; }; shopt -s extglob; cd /tmp", timeout_s=T)
    result = await box.bash("f $x; echo $Y; bash -c 'echo $Y'; shopt extglob", timeout_s=T)
    assert result.text == "f5\n6\n6\nextglob        \ton\n"
    assert result.data["cwd"] == "/tmp"


async def test_a_status_is_reported_and_kept_for_the_next_command(box: Toolbox) -> None:
    result = await box.bash("(exit 7)", timeout_s=T)
    assert result.data["exit_code"] == 7
    assert result.text == "[exit status 7]"
    assert result.ok
    assert (await box.bash("echo $?", timeout_s=T)).text == "7\n"


@pytest.mark.parametrize(
    "command",
    ['echo "never closed', "echo $(", "if true; then", "foo )", "cat <<'END", "for", "}", "'"],
)
async def test_a_syntax_error_is_an_answer_and_the_next_command_works(box: Toolbox, command: str) -> None:
    assert (await box.bash(command, timeout_s=T)).ok
    assert (await box.bash("echo fine", timeout_s=T)).text == "fine\n"


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("cat <<END\none\n$((1+1))\nEND\n", "one\n2\n"),
        ("for i in 1 2; do\n  echo $i\ndone", "1\n2\n"),
        ("echo 'it'\"'\"'s'", "it's\n"),
        ("echo '!!' \\!", "!! !\n"),
        ("# only a comment", ""),
        ("", ""),
        ("echo a; # b", "a\n"),
        ("echo \\\nb", "b\n"),
        ("echo 'héllo ☃'", "héllo ☃\n"),
        ("printf '%s' \"" + "x" * 8000 + '"', "x" * 8000),
        ("printf '\\x03\\x04\\x1a' | od -An -tx1", " 03 04 1a\n"),
        ("echo '\x03\x04'", "\x03\x04\n"),
        (f"x='{'y' * 200_000}'; echo ${{#x}}", "200000\n"),
        ("exec 3>&1; echo a >&3; exec 3>&-", "a\n"),
        ("(exec 1>&- 2>&-; echo x); echo b", "b\n"),
    ],
)
async def test_any_text_reaches_the_shell_unharmed(box: Toolbox, command: str, output: str) -> None:
    assert (await box.bash(command, timeout_s=T)).text == output


async def test_the_shell_can_exit_and_a_new_one_starts_where_it_was(box: Toolbox) -> None:
    await box.bash("cd /tmp; x=1", timeout_s=T)
    result = await box.bash("exit 3", timeout_s=T)
    assert result.data["exit_code"] == 3
    assert "the shell exited with status 3" in result.text
    result = await box.bash("echo ${x-unset}; pwd", timeout_s=T)
    assert result.text == "unset\n/tmp\n"


async def test_a_killed_shell_is_reported_and_replaced(box: Toolbox) -> None:
    result = await box.bash("kill -9 $$", timeout_s=T)
    assert not result.ok
    assert result.data["exit_code"] is None
    assert "killed by signal 9" in result.text
    assert (await box.bash("echo back", timeout_s=T)).text == "back\n"


async def test_a_shell_that_exits_between_commands_is_reported_with_the_next(box: Toolbox) -> None:
    await box.bash("(sleep 0.05; kill -9 $$) & disown", timeout_s=T)
    await box.run(["sleep", "0.3"], timeout_s=T)
    result = await box.bash("echo back", timeout_s=T)
    assert result.text.startswith("back\n[before this command, the shell was killed by signal 9")


async def test_exec_replaces_the_shell_and_a_new_one_follows(box: Toolbox) -> None:
    result = await box.bash("exec echo gone", timeout_s=T)
    assert result.text.startswith("gone\n[the shell exited with status 0")
    assert (await box.bash("echo back", timeout_s=T)).text == "back\n"


async def test_errexit_affects_only_its_command(box: Toolbox) -> None:
    assert (await box.bash("set -e; true", timeout_s=T)).ok
    assert (await box.bash("false; echo on", timeout_s=T)).text == "on\n"
    assert "the shell exited with status 1" in (await box.bash("set -e; false; echo no", timeout_s=T)).text


async def test_tracing_shows_only_the_command(box: Toolbox) -> None:
    assert (await box.bash("set -xv; echo a", timeout_s=T)).text == "++ echo a\na\n"
    assert (await box.bash("echo b", timeout_s=T)).text == "b\n"


@pytest.mark.parametrize("options", ["", "set -T; ", "shopt -s extdebug; "])
async def test_a_debug_trap_shows_only_the_command(box: Toolbox, options: str) -> None:
    trap = "trap 'echo DBG \"$BASH_COMMAND\" >&2' DEBUG"
    assert (await box.bash(f"{options}{trap}; echo a", timeout_s=T)).text == "DBG echo a\na\n"
    for text in ("false", f"false #{'x' * 600}", "(exit 1)"):
        result = await box.bash(text, timeout_s=T)
        assert (result.text, result.data["exit_code"]) == ("[exit status 1]", 1)


async def test_prompts_and_terminal_settings_do_no_harm(box: Toolbox) -> None:
    await box.bash("PS1='$ '; PS2='> '; PROMPT_COMMAND='echo prompt'; stty raw echo -isig", timeout_s=T)
    for _ in range(2):
        assert (await box.bash("echo clean\necho twice", timeout_s=T)).text == "clean\ntwice\n"


async def test_a_killed_command_leaves_the_terminal_as_it_was(box: Toolbox) -> None:
    for _ in range(3):
        result = await box.bash("sh -c 'kill -9 $$'; stty -a | grep -o -e -opost; echo b", timeout_s=T)
        assert result.text.endswith("\n-opost\nb\n")
        assert "\r" not in result.text


async def test_no_history_is_kept(box: Toolbox) -> None:
    await box.bash("echo secret; exit", timeout_s=T)
    assert (await box.bash("history; ls -A ~ .", timeout_s=T)).text.split() == [".:", "/home/agent:"]


async def test_a_background_job_does_not_block_the_call_and_survives(box: Toolbox) -> None:
    result = await box.bash("sleep 100 & echo started", timeout_s=T)
    assert "started" in result.text
    assert result.duration_s < 10
    assert (await box.bash("jobs -r | wc -l; kill %1", timeout_s=T)).text == "1\n"


async def test_a_finished_background_job_is_not_announced_at_the_next_command(box: Toolbox) -> None:
    await box.bash("true &", timeout_s=T)
    await box.run(["sleep", "0.1"], timeout_s=T)
    assert (await box.bash("echo next", timeout_s=T)).text == "next\n"


async def test_later_output_of_a_background_job_comes_with_the_next_command(box: Toolbox) -> None:
    await box.bash("(sleep 0.1; echo later) & disown", timeout_s=T)
    await box.run(["sleep", "0.3"], timeout_s=T)
    assert (await box.bash("echo now", timeout_s=T)).text == "later\nnow\n"


async def test_a_flood_of_a_background_job_is_bounded_and_comes_with_the_next_command(box: Toolbox) -> None:
    await box.bash("(sleep 0.1; head -c 300000 /dev/zero | tr '\\0' x; touch written) & disown", timeout_s=T)
    await box.run(["sh", "-c", "until [ -e written ]; do sleep 0.01; done"], timeout_s=T)
    result = await box.bash("echo now", timeout_s=T)
    assert result.text.startswith("xxx") and result.text.endswith("x" * 100 + "now\n")
    assert len(result.text) < box.limits.output_bytes + 200


async def test_endless_output_is_bounded_and_its_ends_are_kept(box: Toolbox) -> None:
    result = await box.bash(
        "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last", timeout_s=60
    )
    assert result.text.startswith("first\nxxx")
    assert result.text.endswith("x\nlast\n")
    assert len(result.text) < box.limits.output_bytes + 200
    assert result.truncated_bytes == 100_000_012 - box.limits.output_bytes
    assert f"{result.truncated_bytes} bytes of output left out" in result.text


async def test_output_is_complete_however_fast_the_command_ends(box: Toolbox) -> None:
    for size in (1, 4095, 4096, 30000):
        for _ in range(20):
            result = await box.bash(f"head -c {size} /dev/zero | tr '\\0' y", timeout_s=T)
            assert result.text == "y" * size


async def test_invalid_unicode_is_replaced(box: Toolbox) -> None:
    assert (await box.bash(r"printf 'a\xff\xfeb\n'", timeout_s=T)).text == "a��b\n"


@pytest.mark.parametrize("command", ["sleep 100; echo no", "while :; do :; done", "sleep 100 | cat"])
async def test_at_the_deadline_the_command_is_interrupted_and_the_shell_kept(
    box: Toolbox, command: str
) -> None:
    await box.bash("kept=yes", timeout_s=T)
    result = await at_deadline(lambda limit_s: box.bash(f"echo before; {command}", timeout_s=limit_s))
    assert not result.ok
    assert result.data["exit_code"] is None
    assert "s: it was interrupted" in result.text
    assert "no\n" not in result.text
    assert (await box.bash("echo $kept", timeout_s=T)).text == "yes\n"


@pytest.mark.parametrize("box", [HASTY], indirect=True)
async def test_a_command_that_ignores_the_interrupt_is_killed_and_the_shell_kept(box: Toolbox) -> None:
    await box.bash("kept=yes", timeout_s=T)
    command = "bash -c 'trap \"\" INT; echo before; sleep 100; sleep 100'"
    result = await at_deadline(lambda limit_s: box.bash(command, timeout_s=limit_s))
    assert "it ignored the interrupt and was killed" in result.text
    gone = "while grep -qsx sleep /proc/[0-9]*/comm; do :; done"
    assert (await box.bash(f"echo $kept; {gone}", timeout_s=T)).text == "yes\n"


@pytest.mark.parametrize("box", [HASTY], indirect=True)
async def test_an_unusable_shell_is_replaced(box: Toolbox) -> None:
    await box.bash("lost=yes", timeout_s=T)
    command = "trap '' INT; echo before; while :; do sleep 0.01; done"
    result = await at_deadline(lambda limit_s: box.bash(command, timeout_s=limit_s))
    assert "the shell was killed by signal 9" in result.text
    assert (await box.bash("echo ${lost-unset}", timeout_s=T)).text == "unset\n"


async def test_a_new_shell_starts_though_the_last_directory_was_locked(box: Toolbox) -> None:
    await box.bash("mkdir locked; cd locked; chmod 000 .", timeout_s=T)
    await box.bash("exit", timeout_s=T)
    result = await box.bash("pwd", timeout_s=T)
    assert (result.text, result.data["exit_code"]) == ("/workspace\n", 0)


async def test_a_forged_end_is_ignored(box: Toolbox) -> None:
    forge = "printf 'x 0 /\\0deadbeefdeadbeef 0 /forged\\0' > /proc/$$/fd/41; for f in /proc/$$/fd/*; do"
    result = await box.bash(
        f"{forge} printf 'deadbeef 0 /forged\\0' >> $f; done; echo end; false", timeout_s=T
    )
    assert "end\n" in result.text
    assert result.data["exit_code"] == 1
    assert result.data["cwd"] == "/workspace"


async def test_a_command_has_only_its_own_descriptors(box: Toolbox) -> None:
    assert (await box.bash("ls /proc/self/fd | wc -l", timeout_s=T)).text == "4\n"  # 0, 1, 2 and ls's own


async def test_redirections_of_the_shell_itself_persist(box: Toolbox) -> None:
    await box.bash("exec 5>kept", timeout_s=T)
    await box.bash("echo five >&5", timeout_s=T)
    assert await box.read("/workspace/kept") == b"five\n"


async def test_broken_pipes_are_silent(box: Toolbox) -> None:
    assert (await box.bash("yes | head -1", timeout_s=T)).text == "y\n"


async def test_sessions_are_independent_and_run_in_parallel(box: Toolbox) -> None:
    await box.bash("x=1", timeout_s=T)
    slow = asyncio.create_task(box.bash("mkfifo gate; cat gate", timeout_s=T))
    await box.run(["sh", "-c", "until [ -p gate ]; do sleep 0.01; done"], timeout_s=T)
    assert (await box.bash("echo ${x-unset}; echo open > gate", timeout_s=T, session="b")).text == "unset\n"
    assert (await slow).text == "open\n"


async def test_calls_of_one_session_run_in_order(box: Toolbox) -> None:
    results = await asyncio.gather(*(box.bash(f"sleep 0.01; echo {n}", timeout_s=T) for n in range(10)))
    assert [result.text for result in results] == [f"{n}\n" for n in range(10)]


async def test_a_cancelled_call_is_interrupted_and_the_shell_survives(box: Toolbox) -> None:
    await box.bash("kept=yes", timeout_s=T)
    call = asyncio.create_task(box.bash("sh -c 'touch begun; exec sleep 100'; touch ended", timeout_s=T))
    await box.run(["sh", "-c", "until [ -e begun ]; do sleep 0.01; done"], timeout_s=T)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    result = await box.bash("echo $kept; ls", timeout_s=T)
    assert result.text == "yes\nbegun\n"
    assert result.duration_s < 10


async def test_a_call_that_is_cancelled_at_once_is_stopped(box: Toolbox) -> None:
    await box.bash("kept=yes", timeout_s=T)
    for _ in range(8):  # at any stage of its start
        call = asyncio.create_task(box.bash("sleep 100", timeout_s=T))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        result = await box.bash("echo $kept", timeout_s=T)
        assert result.text == "yes\n" and result.duration_s < 10


async def test_a_call_cancelled_while_it_waits_never_runs(box: Toolbox) -> None:
    first = asyncio.create_task(box.bash("sleep 0.2", timeout_s=T))
    second = asyncio.create_task(box.bash("touch never", timeout_s=T))
    await asyncio.sleep(0)
    second.cancel()
    await first
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (await box.bash("ls", timeout_s=T)).text == ""


async def test_the_environment_is_the_sandboxes_and_pagers_do_not_block(box: Toolbox) -> None:
    env = (await box.bash("env", timeout_s=T)).text
    names = {line.partition("=")[0] for line in env.splitlines()}
    assert names <= {
        "PATH",
        "HOME",
        "LANG",
        "TERM",
        "PAGER",
        "GIT_PAGER",
        "MANPAGER",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
    }
    assert "TERM=dumb" in env


@pytest.mark.parametrize("command", ["echo \0", "echo \ud800"])
async def test_commands_that_bash_cannot_take_are_refused(box: Toolbox, command: str) -> None:
    assert not (await box.bash(command, timeout_s=T)).ok


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
async def test_a_timeout_must_be_a_valid_time(box: Toolbox, timeout_s: float) -> None:
    with pytest.raises(InputError):
        await box.bash("true", timeout_s=timeout_s)


async def test_results_are_json(box: Toolbox) -> None:
    result = await box.bash(r"printf '\xff'; cd /; mkdir -p $'/tmp/a\xff'; cd $'/tmp/a\xff'", timeout_s=T)
    assert json.loads(json.dumps(result.data))["cwd"] == "/tmp/a�"
