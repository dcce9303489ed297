"""Commands that damage their own shell; the session survives."""

import shutil

import pytest

from prorl_envs.tools.client.toolbox import Toolbox

pytestmark = pytest.mark.anyio
T = 60.0


@pytest.mark.parametrize(
    "command",
    [
        "exec 0<&-",
        "exec 0</dev/null",
        "exec 2>&-",
        "exec 40<&- 41>&-",
        "exec 41>/dev/null 40</dev/null",
        "exec 990<&- 991>&-",
        "readonly PATH HOME; PATH=/none",
        "readonly PS1 PS2 PROMPT_COMMAND",
        "PROMPT_COMMAND='echo prompt; exit 4' PS1='$ ' PS2='> ' PS0='ps0 ' PS4='ps4 '",
        "builtin() { echo shadow; }; eval() { echo e; }; printf() { echo p; }; exec() { echo x; }",
        "set() { echo s; }; unset() { echo u; }; builtin() { echo shadow; }",
        "alias builtin='echo B' eval='echo E' printf='echo P' set='echo S' exec='echo X'",
        "enable -n eval printf builtin set",
        "set -u; echo $nope; echo more",
        "set -f; set -C; set -k; set -B; set -h; set -P; set -b; set -n",
        "set -a",
        "set -o posix; eval 'foo )'; export 1x=2",
        "set -r",
        "set -T; set -E",
        "shopt -s extglob nullglob failglob dotglob globstar nocaseglob lastpipe xpg_echo",
        "shopt -u expand_aliases; shopt -s login_shell 2>/dev/null",
        "IFS=0123456789",
        "TMOUT=1",
        "unset PWD OLDPWD",
        "set -u; unset PWD",
        "ulimit -n 50",
        "trap 'true' DEBUG; trap 'true' RETURN; trap 'true' ERR; trap 'true' EXIT",
        "trap '' INT QUIT TSTP TTIN TTOU HUP TERM; trap - INT QUIT TSTP TTIN TTOU HUP TERM",
        "kill -STOP $$",
        "suspend",
        "kill -INT $$",
        "sh -c 'kill -STOP $$'",
        "stty raw -echo",
        "stty -icanon min 1 time 0 -isig -ixon; stty cols 1 rows 1",
        "printf '\\033[?1049h\\033c\\033[31m\\016'",
        "cat /dev/urandom | head -c 100000",
        "cat & sleep 0.1",
        "(exit 200)",
        "return 3; break; continue; shift 10",
        "x=1; readonly x; x=2",
        "disown -a; set +o monitor; fg; bg",
        "exec 5<>/dev/tty; exec 6>&5 5>&-",
        "coproc cat",
        "exec {a}<&0 {b}<&0 {c}>&1 {d}>&1",
        "cat <(echo 1) <(echo 2) <(echo 3) <(echo 4)",
        "PATH=",
        "LANG=xx LC_ALL=xx; export LANG LC_ALL",
        "hash -p /none/echo echo; hash -d echo",
        "mkdir gone; cd gone; rmdir ../gone",
        "mkdir -p '/tmp/a b\nc'; cd '/tmp/a b\nc'",
        "for i in {1..60}; do mkdir -p d$'\\xc3\\xa9'{1..1}$(printf '%0120d' 0) && cd d*; done",
        "eval 'eval \"exec 7>&1\"'; exec 7>&-",
        "history; fc -l; bind -p | head -1; complete -p",
    ],
)
async def test_the_same_shell_survives(box: Toolbox, command: str) -> None:
    await box.bash("kept=yes", timeout_s=T)
    result = await box.bash(command, timeout_s=T)
    assert not result.data["timed_out"]
    for text in ("echo $kept", f"echo $kept #{'x' * 600}"):
        last = await box.bash(text, timeout_s=T)
        assert (last.text, last.data["exit_code"]) == ("yes\n", 0)


@pytest.mark.parametrize(
    "command",
    # `set -o vi` in an `eval` crashes a bash that started without line editing: a bug of bash 5.2.
    [
        "set -o vi",
        "shopt -s extdebug; trap false DEBUG",
        "exec cat",
        "exec bash --norc",
        "ulimit -n 8",
        "ulimit -n 5",
        "ulimit -f 0; echo x > file",
        "exec sleep 0.1",
    ],
)
async def test_a_shell_that_cannot_be_repaired_is_replaced_at_once(box: Toolbox, command: str) -> None:
    result = await box.bash(command, timeout_s=T)
    assert not result.data["timed_out"]
    assert (await box.bash("echo back", timeout_s=T, restart=result.data["waiting"])).text.startswith(
        "back\n"
    )


async def test_a_shell_that_cannot_report_its_waiting_command_is_replaced(box: Toolbox) -> None:
    result = await box.bash("ulimit -n 12; read x", timeout_s=T)
    assert "the shell" in result.text and not result.data["waiting"]
    assert (await box.bash("echo back", timeout_s=T)).text == "back\n"


async def test_no_alias_changes_the_reported_status(box: Toolbox) -> None:
    await box.bash("alias '{'='true; {' '}'='}; true' '[['='true; [[' false2=false", timeout_s=T)
    for command in ("false", "false2"):
        assert (await box.bash(command, timeout_s=T)).data["exit_code"] == 1
    assert (await box.bash("alias false2", timeout_s=T)).text == "alias false2='false'\n"


async def test_a_closed_standard_output_stays_closed(box: Toolbox) -> None:
    await box.bash("exec 1>&-", timeout_s=T)
    assert "Bad file descriptor" in (await box.bash("echo a", timeout_s=T)).text
    assert (await box.bash("echo b >&2", timeout_s=T)).text == "b\n"
    await box.bash("exec 1>&2", timeout_s=T)
    assert (await box.bash("echo c", timeout_s=T)).text == "c\n"


async def test_extended_patterns_can_be_used_from_the_next_line_on(box: Toolbox) -> None:
    result = await box.bash("shopt -s extglob\ncase aa in +(a)) echo yes;; esac", timeout_s=T)
    assert result.text == "yes\n"


async def test_traps_run_as_in_any_shell(box: Toolbox) -> None:
    await box.bash("trap 'echo bye' EXIT; trap 'echo err $?' ERR", timeout_s=T)
    assert "err 1\n" in (await box.bash("false", timeout_s=T)).text
    assert (await box.bash("true", timeout_s=T)).text == ""
    assert "bye\n[exit status 3]" in (await box.bash("trap - ERR; exit 3", timeout_s=T)).text


async def test_errexit_leaves_a_nested_shell(box: Toolbox) -> None:
    assert (await box.bash("x=outer; bash --norc --noprofile", timeout_s=T)).data["waiting"]
    inner = await box.bash("x=inner; cd /tmp; set -e", timeout_s=T, is_input=True)
    assert inner.data["waiting"]
    left = await box.bash("false", timeout_s=T, is_input=True)
    assert left.data["exit_code"] == 1
    result = await box.bash("echo $x", timeout_s=T)
    assert result.text == "outer\n"
    assert result.data["cwd"] == "/workspace"


@pytest.mark.skipif(shutil.which("less") is None, reason="less is not installed")
async def test_a_full_screen_program_shows_its_screen_and_can_be_quit(box: Toolbox) -> None:
    await box.bash("seq 1000 > long", timeout_s=T)
    shown = await box.bash("TERM=xterm less long", timeout_s=T)
    assert shown.data["waiting"]
    assert "1\n2\n" in shown.text.replace("\r", "")
    assert (await box.bash("q", timeout_s=T, is_input=True)).data["exit_code"] == 0
    assert (await box.bash("echo fine", timeout_s=T)).text == "fine\n"
