"""Catalogue of measurements: our subjects, the floors and the peers, by figure."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """One subject, a row of a table.

    Args:
        module: module below `bench.subjects`; also the name of a peer's environment and file of packages.
        kind: variant of the module.
        label: name in the table.
        keeps: state that persists between actions: "yes" (directory, variables and functions), "files" or
            "no".
        isolates: resources that the subject's commands cannot reach.
        peer: whether the subject has its own environment.
        image: whether the subject needs the SIF.
        needs: programs that the subject needs.
    """

    module: str
    kind: str
    label: str
    keeps: str = field(default="yes", kw_only=True)
    isolates: str = field(default="nothing", kw_only=True)
    peer: bool = field(default=True, kw_only=True)
    image: bool = field(default=False, kw_only=True)
    needs: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def key(self) -> str:
        return f"{self.module} {self.kind}".strip()

    @property
    def arguments(self) -> tuple[str, ...]:
        return (self.kind,) if self.kind else ()


ALL = "all namespaces"

PTY = Entry("floor", "pty", "raw pty, no sandbox (floor)", peer=False)
BWRAP = Entry("floor", "bwrap", "pipes to a bash in bare bubblewrap", isolates=ALL, peer=False)
OURS = Entry("ours", "bash", "**prorl-envs bash**", isolates=ALL, peer=False)
PROCESS = Entry("ours", "process", "prorl-envs, fresh process", keeps="files", isolates=ALL, peer=False)
POOL = Entry("ours", "pool", "**prorl-envs, warm pool**", isolates=ALL, peer=False)
SIF_NEEDS = ("apptainer", "squashfuse_ll", "fusermount3")
SIF = Entry("ours", "sif", "**prorl-envs, SIF**", isolates=ALL, peer=False, image=True, needs=SIF_NEEDS)
INSIDE = Entry(
    "ours", "apptainer", "prorl-envs inside Apptainer", isolates=ALL, peer=False, needs=("apptainer",)
)
INSIDE_SIF = Entry(
    "ours",
    "apptainer-sif",
    "prorl-envs inside Apptainer, SIF",
    isolates=ALL,
    peer=False,
    image=True,
    needs=SIF_NEEDS,
)
SWE_REX = Entry("swe_rex", "local", "SWE-ReX, local")
SWE_REX_HTTP = Entry("swe_rex", "http", "SWE-ReX, its HTTP server")
OH_TMUX = Entry("openhands_tools", "tmux", "OpenHands terminal tool, tmux", needs=("tmux",))
OH_PTY = Entry("openhands_tools", "subprocess", "OpenHands terminal tool, pty")
OH_SERVER = Entry("openhands_tools", "server", "OpenHands agent server, HTTP", keeps="files")
OH_OLD = Entry("openhands_ai", "", "OpenHands 0.x tmux session", needs=("tmux",))
MINI = Entry("mini_swe_agent", "local", "mini-swe-agent, local", keeps="files")
MINI_BWRAP = Entry(
    "mini_swe_agent", "bubblewrap", "mini-swe-agent, bubblewrap", keeps="files", isolates="mounts, user"
)
INSTANCE = Entry(
    "apptainer_exec",
    "instance",
    "`apptainer exec instance://`",
    keeps="files",
    isolates="mounts, pid, user",
    peer=False,
    image=True,
    needs=("apptainer",),
)
EXEC = Entry(
    "apptainer_exec",
    "image",
    "`apptainer exec` of the SIF",
    keeps="no",
    isolates="mounts, user",
    peer=False,
    image=True,
    needs=("apptainer",),
)
IPYTHON = Entry("ours", "ipython", "**prorl-envs IPython**", isolates=ALL, peer=False)
OUR_KERNEL = Entry("ours", "kernel", "prorl-envs, Jupyter kernel in the sandbox", isolates=ALL, peer=False)
KERNEL = Entry("jupyter", "tcp", "ipykernel, tcp")
KERNEL_IPC = Entry("jupyter", "ipc", "ipykernel, ipc")
GATEWAY = Entry("jupyter", "gateway", "Jupyter kernel gateway")

BASH = (
    *(PTY, BWRAP, OURS, PROCESS, SWE_REX, SWE_REX_HTTP, OH_TMUX, OH_PTY, OH_SERVER, OH_OLD),
    *(MINI, MINI_BWRAP, INSTANCE),
)
READY = (BWRAP, OURS, POOL, SIF, INSIDE, INSIDE_SIF, EXEC, SWE_REX, OH_TMUX, OH_PTY, OH_OLD)
CELL = (IPYTHON, OUR_KERNEL, KERNEL, KERNEL_IPC, GATEWAY)
IDLE = (OURS, IPYTHON, OUR_KERNEL, KERNEL)
