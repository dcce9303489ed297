"""Promises about the environment: a sandbox has its own variables and names, and none of the service's."""

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.host import SECRET
from prorl_envs.conformance.promise import NOT_LOCAL, ORDINARY, PYTHON, SESSION, Promises, expect, same
from prorl_envs.conformance.promises.end import Victim
from prorl_envs.conformance.promises.processes import SEARCH, halves
from prorl_envs.conformance.world import PromiseContext

promises = Promises("environment")

#: Variables of every process besides the spec's: those of the sandbox, the tools and the shell.
CUSTOMARY = {"PATH", "HOME", "LANG", "TERM", "PAGER", "GIT_PAGER", "MANPAGER", "PWD", "OLDPWD", "SHLVL", "_"}
_EXPORTED = (
    "export -p | while IFS= read -r line; do "
    "n=${line#* }; case $n in -x*) n=${n#-x };; esac; echo ${n%%=*}; done"
)


@promises.fresh(
    "ENV-001",
    "The environment has the spec's variables and the customary names, and nothing else.",
    exempt={"local": "marks its processes by variables"},
    fields={"env": {"GIVEN": "1"}},
)
async def exact(box: Probe) -> None:
    same(set((await box.sh(_EXPORTED)).split()) - CUSTOMARY, {"GIVEN"})


@promises.add("ENV-005", "No process inside has a variable of the service's environment.", exempt=NOT_LOCAL)
async def secret_in_environments(world: PromiseContext) -> None:
    look = (
        f"{SEARCH}\nsearch environ {halves(world.planted.secret)}\nsearch cmdline {halves(SECRET)}\necho end"
    )
    async with world.own_driver() as (_, root):
        output = await Victim(world, root, look=look, linger="while :; do :; done").run_until_killed(1)
    found = [line for line in output.splitlines() if line.startswith("found")]
    same((found, output.splitlines()[-1:]), ([], ["end"]))


#: Searches all readable memory for two adjacent halves of a text, first in small and writable areas, so that
#: it soon finds the text if the service's memory is readable. Its own buffers may have a copy of each half.
_MEMORY = """
import sys
def areas(own):
    for name in os.listdir("/proc"):
        if not name.isdigit() or (int(name) == os.getpid()) != own:
            continue
        try:
            maps = open("/proc/%s/maps" % name).read().splitlines()
        except OSError:
            continue
        for line in maps:
            area, modes = line.split()[:2]
            low, high = (int(part, 16) for part in area.split("-"))
            if modes[0] == "r" and "[v" not in line:
                yield modes[1] != "w", high - low, low, name, line
def search(first, second, own):
    for _, size, low, name, line in sorted(areas(own)):
        try:
            with open("/proc/%s/mem" % name, "rb", 0) as memory:
                for at in range(low, low + size, 1 << 20):
                    memory.seek(at)
                    data = memory.read(min(low + size - at, (1 << 20) + 64))
                    place = data.find(first)
                    while place >= 0:
                        if data[place + len(first):place + len(first) + len(second)] == second:
                            yield "process %s %s" % (name, line)
                        place = data.find(first, place + 1)
        except (OSError, ValueError, OverflowError):
            pass
"""


@promises.add(
    "ENV-006",
    "The service's secrets are in no memory that a process inside can read.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def secret_in_memory(world: PromiseContext) -> None:
    first, second = halves(world.planted.secret).split()
    look = (
        "for text in search(sys.argv[1].encode(), sys.argv[2].encode(), False):\n    print(text)\n    break"
    )
    code = f"{_MEMORY}\n{look}"
    await world.python_box.nothing_in_python(code, first, second)


@promises.add(
    "ENV-007",
    "A Python session, which is forked from a process of the host, has no secret of the service in memory.",
    needs=(SESSION,),
)
async def secret_in_session(world: PromiseContext) -> None:
    first, second = halves(world.planted.secret).split()
    code = f"import os\n{_MEMORY}\nsorted(set(search(b'{first}', b'{second}', True)))"
    async with world.session() as tools:
        same((await tools.python(code, timeout_s=60)).text, "[]\n")


@promises.fresh(
    "ENV-009",
    "The host name is the spec's, in the kernel and in /etc.",
    exempt=NOT_LOCAL,
    fields={"hostname": "node7.test"},
)
async def hostname(box: Probe) -> None:
    script = 'read a < /proc/sys/kernel/hostname; read b < /etc/hostname; echo "$a $b"'
    same(await box.sh(script), "node7.test node7.test")
    expect(
        "node7.test" in await box.sh("while read -r line; do echo $line; done < /etc/hosts"),
        "not in /etc/hosts",
    )


@promises.add(
    "ENV-010",
    "The user id is the spec's.",
    exempt={**NOT_LOCAL, "apptainer-instance": "has no user namespace: the user inside is the service's"},
    needs=(ORDINARY,),
)
async def uid(world: PromiseContext) -> None:
    script = (
        "while read -r name rest; do case $name in Uid:|Gid:) echo $rest;; esac; done < /proc/self/status"
    )
    for number in (1234, 0):
        async with world.fresh(uid=number) as box:
            same((await box.sh(script)).split(), [str(number)] * 8)


@promises.add(
    "ENV-011", "The user has an entry in /etc/passwd, and a writable home directory.", exempt=NOT_LOCAL
)
async def user(world: PromiseContext) -> None:
    script = (
        "while read -r name id rest; do case $name in Uid:) own=$id;; esac; done < /proc/self/status; "
        'while IFS=: read -r a b n rest; do [ "$n" = "$own" ] && echo found; done < /etc/passwd'
    )
    async with world.fresh(uid=1234) as box:
        same(
            await box.sh(f'{script}; echo x > "$HOME/file" && [ -s "$HOME/file" ] && echo written'),
            "found\nwritten",
        )
