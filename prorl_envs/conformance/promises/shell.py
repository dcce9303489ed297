"""Promises about the persistent shell."""

import asyncio

from prorl_envs.conformance.box import TIMEOUT_S, Probe
from prorl_envs.conformance.promise import Promises, expect, same
from prorl_envs.conformance.world import PromiseContext

promises = Promises("bash")

_BASH = ("bash",)


def sequence(id_: str, text: str, *steps: tuple[str, str], needs: tuple[str, ...] = ()) -> None:
    """Add a promise that the commands of a shell, run in order, print these texts."""

    async def keep(world: PromiseContext) -> None:
        async with world.shell() as box:
            for command, printed in steps:
                same((await box.bash(command)).text, printed)

    promises.add(id_, text, needs=(*_BASH, *needs))(keep)


sequence(
    "BASH-001",
    "Output is returned exactly as it was written.",
    (r"printf 'a\tb\n  c'", "a\tb\n  c"),
    ("echo a >&2; echo b", "a\nb\n"),
    ("", ""),
    ("# only", ""),
)
sequence(
    "BASH-002",
    "Variables, functions, options and the directory persist.",
    ("x=5; export Y=6; f() { echo f$1; }; shopt -s extglob; cd /tmp", ""),
    ("f $x; echo $Y; bash -c 'echo $Y'; shopt -q extglob && echo $PWD", "f5\n6\n6\n/tmp\n"),
)
sequence(
    "BASH-003",
    "Several lines, loops, here-documents and quotes work.",
    ("cat <<END\none\n$((1+1))\nEND\n", "one\n2\n"),
    ("for i in 1 2; do\n  echo $i\ndone", "1\n2\n"),
    ("echo 'it'\"'\"'s' \\\n  '!!'", "it's !!\n"),
    ("cat <<'E'\n$x `y` \\\nE", "$x `y` \\\n"),
    needs=("cat",),
)
sequence(
    "BASH-004", "`set -e` applies to its command only.", ("set -e; true", ""), ("false; echo on", "on\n")
)
sequence(
    "BASH-005",
    "Prompts and settings of the terminal do no harm.",
    ("PS1='$ '; PS2='> '; PROMPT_COMMAND='echo prompt'; PS0='x '; set -x", ""),
    ("echo clean\necho twice", "clean\ntwice\n"),
    ("{ stty raw echo -isig; } 2>/dev/null; :", ""),
    ("echo clean", "clean\n"),
)
sequence(
    "BASH-006",
    "A command of two hundred thousand characters works.",
    (f"x='{'y' * 200_000}'; echo ${{#x}}", "200000\n"),
)
sequence(
    "BASH-007",
    "Characters that control a terminal pass unchanged.",
    ("x='\x03\x04\x1a\x15\x7f'; echo ${#x}; printf '%s' \"$x\"", "5\n\x03\x04\x1a\x15\x7f"),
    ("echo 'héllo ☃'", "héllo ☃\n"),
)
sequence(
    "BASH-008",
    "Closed and redirected descriptors of the shell last for their command or do no harm.",
    ("echo x > /dev/null; exec 3>&1; echo a >&3; exec 3>&-", "a\n"),
    ("(exec 1>&- 2>&-; echo x); echo b", "b\n"),
)
sequence(
    "BASH-009",
    "Traps of a command do not catch what the shell needs.",
    ("trap 'echo caught' INT TERM HUP USR1; trap 'true' DEBUG; trap 'true' RETURN", ""),
    ("echo on", "on\n"),
)


@promises.shell("BASH-010", "The status is returned, and kept for the next command.")
async def status(box: Probe) -> None:
    result = await box.bash("(exit 7)")
    same((result.ok, result.text, result.data["exit_code"]), (True, "[exit status 7]", 7))
    same((await box.bash("echo $?")).text, "7\n")


@promises.shell("BASH-011", "The directory after a command is returned.")
async def directory(box: Probe) -> None:
    same((await box.bash("cd /tmp; cd /")).data["cwd"], "/")


@promises.shell("BASH-012", "Text that is not a valid command gets an answer, and the next command works.")
async def syntax(box: Probe) -> None:
    for text in (
        'echo "never closed',
        "echo $(",
        "if true; then",
        "foo )",
        "cat <<'END",
        "for",
        "}",
        "'",
        "\\",
    ):
        expect((await box.bash(text)).data["timed_out"] is False, f"{text!r} was not over")
        same((await box.bash("echo fine")).text, "fine\n")


@promises.shell("BASH-013", "The exit of a shell is reported, and a new shell starts.")
async def exits(box: Probe) -> None:
    await box.bash("cd /tmp; x=1")
    result = await box.bash("exit 3")
    expect(
        result.data["exit_code"] == 3 and "exited with status 3" in result.text,
        f"it said {result.text!r}",
    )
    same((await box.bash("echo ${x-unset} $PWD")).text, "unset /tmp\n")


@promises.shell("BASH-014", "A killed shell is distinguished from one that exits, and a new shell starts.")
async def killed(box: Probe) -> None:
    result = await box.bash("kill -9 $$")
    expect(not result.ok and "signal 9" in result.text, f"it said {result.text!r}")
    same((await box.bash("echo back")).text, "back\n")


@promises.shell("BASH-015", "`exec` replaces the shell; the model is notified and a new shell starts.")
async def replaced(box: Probe) -> None:
    result = await box.bash("exec bash -c 'echo gone'")
    expect(result.text.startswith("gone\n[the shell exited"), f"it said {result.text!r}")
    same((await box.bash("echo back")).text, "back\n")


@promises.shell(
    "BASH-016",
    "At its deadline a command is interrupted; its output and the shell are kept.",
    needs=("bash", "sleep"),
)
async def deadline(box: Probe) -> None:
    await box.bash("x=kept")
    result = await box.bash("echo before; sleep 600; echo ending", timeout_s=1.0)
    same((result.ok, result.data["timed_out"], result.data["exit_code"]), (False, True, None))
    expect(result.text.startswith("before\n") and "ending" not in result.text, f"it printed {result.text!r}")
    same((await box.bash("echo $x")).text, "kept\n")


@promises.shell(
    "BASH-017",
    "A command that ignores the interrupt is killed, and the shell is kept.",
    needs=("bash", "sleep"),
)
async def stubborn(box: Probe) -> None:
    await box.bash("x=kept")
    command = "bash -c 'trap \"\" INT; echo before; while :; do sleep 1; done'"
    result = await box.bash(command, timeout_s=1.0)
    expect(result.text.startswith("before\n") and result.data["timed_out"], f"it gave {result.text!r}")
    same((await box.bash("echo $x")).text, "kept\n")


@promises.shell("BASH-018", "A shell that cannot be interrupted is killed, and a new shell starts.")
async def hopeless(box: Probe) -> None:
    result = await box.bash("trap '' INT; while :; do :; done", timeout_s=1.0)
    expect(result.data["timed_out"], f"it gave {result.text!r}")
    same((await box.bash("echo back")).text, "back\n")


@promises.shell("BASH-019", "A command that waits for input is reported at once, and receives typed input.")
async def waits(box: Probe) -> None:
    result = await box.bash("read -p 'name? ' name", timeout_s=30.0)
    expect(result.text.startswith("name?") and result.data["waiting"], f"it gave {result.text!r}")
    refused = await box.bash("echo ${name:-empty}")
    expect(not refused.ok and "still waits" in refused.text, f"meanwhile it gave {refused.text!r}")
    await box.bash("Ada", is_input=True)
    same((await box.bash("echo $name")).text, "Ada\n")


@promises.shell(
    "BASH-020", "A background job does not block the call, and continues to run.", needs=("bash", "sleep")
)
async def background(box: Probe) -> None:
    result = await box.bash("sleep 600 & echo started")
    expect("started" in result.text and not result.data["timed_out"], f"it gave {result.text!r}")
    same((await box.bash("kill -0 $! && echo alive; kill $!")).text, "alive\n")


@promises.shell(
    "BASH-021", "Later output of a background job is returned with the next command.", needs=("bash", "sleep")
)
async def later(box: Probe) -> None:
    await box.bash("(sleep 0.1; echo later) & disown")
    await box.tools.run(["sleep", "0.4"], timeout_s=TIMEOUT_S)
    same((await box.bash("echo now")).text, "later\nnow\n")


@promises.shell(
    "BASH-022",
    "A hundred million bytes of output are bounded; both ends are kept and the rest is counted.",
    needs=("bash", "head", "tr"),
)
async def flood(box: Probe) -> None:
    result = await box.bash("echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last")
    limit = box.tools.limits.output_bytes
    expect(result.text.startswith("first\nxxx") and result.text.endswith("x\nlast\n"), "an end is missing")
    expect(len(result.text) < limit + 200, f"{len(result.text)} characters")
    same(result.truncated_bytes, 100_000_012 - limit)
    expect(f"{result.truncated_bytes} bytes" in result.text, "the count is not reported")


@promises.shell("BASH-023", "Output with any bytes is returned as valid text.", needs=("bash", "head"))
async def binary(box: Probe) -> None:
    result = await box.bash(r"printf 'a\377\376\300b'; head -c 20000 /dev/urandom; printf '\nend'")
    result.text.encode()
    expect(result.text.startswith("a\ufffd") and result.text.endswith("end"), f"it gave {result.text[:20]!r}")
    same((await box.bash("echo on")).text, "on\n")


@promises.shell("BASH-024", "Each session is a separate shell.")
async def sessions(box: Probe) -> None:
    await box.bash("x=main; cd /tmp")
    same((await box.bash("echo ${x-unset}", session="other")).text, "unset\n")
    same((await box.bash("echo $x $PWD")).text, "main /tmp\n")


@promises.shell(
    "BASH-025", "Sessions run in parallel; a busy session blocks no other.", needs=("bash", "sleep")
)
async def side_by_side(box: Probe) -> None:
    busy = asyncio.ensure_future(box.bash("sleep 600", session="busy"))
    names = [f"s{number}" for number in range(6)]
    results = await asyncio.gather(*(box.bash(f"echo {name}", session=name) for name in names))
    same([result.text for result in results], [f"{name}\n" for name in names])
    expect(not busy.done(), "the busy one ended")
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)


@promises.shell("BASH-026", "Commands of one session run in the order of their calls.")
async def order(box: Probe) -> None:
    await box.bash("n=0")
    results = await asyncio.gather(*(box.bash("n=$((n+1)); echo $n") for _ in range(20)))
    same([result.text for result in results], [f"{number}\n" for number in range(1, 21)])


@promises.shell("BASH-027", "A cancelled command is stopped, and the shell is kept.", needs=("bash", "sleep"))
async def cancelled(box: Probe) -> None:
    await box.bash("x=kept")
    call = asyncio.ensure_future(box.bash("sleep 600; echo more"))
    await asyncio.wait([call], timeout=0.2)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    same((await box.bash("echo $x")).text, "kept\n")


@promises.fresh("BASH-028", "No history of commands is stored.", needs=_BASH)
async def history(box: Probe) -> None:
    await box.bash("echo secret; exit")
    same((await box.bash("history; echo ~/.bash_h* .bash_h*")).text.count("secret"), 0)
    expect("_h*" in (await box.bash("echo ~/.bash_h*")).text, "a history file was written")


@promises.shell("BASH-029", "Terminal programs that draw and clear do not affect later output.")
async def drawing(box: Probe) -> None:
    await box.bash(r"printf '\033[?1049h\033[2J\033[H\033[?25l\033[31m\033c\016'; printf '\033[6n\033[c'")
    same((await box.bash("echo plain")).text, "plain\n")


@promises.shell("BASH-030", "Text with invalid characters is refused with a message.")
async def no_text(box: Probe) -> None:
    for text in ("a\0b", "\ud800"):
        result = await box.bash(text)
        expect(not result.ok and bool(result.text), f"it gave {result}")
    same((await box.bash("echo on")).text, "on\n")


@promises.shell("BASH-031", "A waiting command can be interrupted, and reads nothing of the next command.")
async def interrupted_while_waiting(box: Probe) -> None:
    await box.bash("read -p 'name? ' name", timeout_s=30.0)
    await box.bash("C-c", is_input=True)
    same((await box.bash("echo ${name:-empty}")).text, "empty\n")


@promises.shell("BASH-051", "No alias changes the reported status of a command.")
async def aliases(box: Probe) -> None:
    await box.bash("alias '{'='true; {' '}'='}; true' '[['='true; [[' false2=false")
    same((await box.bash("false")).data["exit_code"], 1)
    same((await box.bash("false2")).data["exit_code"], 1)
    same((await box.bash("alias false2")).text, "alias false2='false'\n")


@promises.shell(
    "BASH-052",
    "A shell that cannot report because it lowered its own limits is replaced, and the answer says so.",
)
async def own_limits(box: Probe) -> None:
    for command in ("ulimit -n 5", "ulimit -n 12; read x", "ulimit -f 0; echo x > file"):
        result = await box.bash(command)
        expect("the shell" in result.text and not result.data["waiting"], f"it said {result.text!r}")
        same((await box.bash("echo on")).text, "on\n")
