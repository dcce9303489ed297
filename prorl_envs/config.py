"""Every setting, typed, in one place. Read once, at the edge: a YAML file, then the environment over it.

service: {run: 64}          # file
PRORL_SERVICE__RUN=64       # environment: sections and settings joined by two underscores
"""

import difflib
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
)

from prorl_envs.errors import InputError

PREFIX = "PRORL_"

ExpandedPath = Annotated[Path, AfterValidator(Path.expanduser)]


#: What a service that is served keeps jobs and results in where nothing is named; and what names memory.
DEFAULT_STORE, IN_MEMORY = Path("runs/service.db"), "memory"


def _store(value: object) -> object:
    if value == IN_MEMORY:
        return None
    if isinstance(value, str):
        is_url = value.startswith(("postgresql://", "postgres://"))
        return SecretStr(value) if is_url else Path(value).expanduser()
    return value


#: A file, or the URL of a PostgreSQL database, which may hold a password; None where it is memory.
StoreLocation = Annotated[Path | SecretStr | None, BeforeValidator(_store)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceSettings(_Section):
    """The rollout service.

    Args:
        init, run, eval: jobs active in each stage at once.
        live: jobs that hold a sandbox at once, waiting between stages included; None takes the sum of the
            three pools.
        attempts: how often a job is tried when the infrastructure fails, the first time included.
        queue: jobs accepted and not finished; more are refused until some finish.
        keep_results: results kept for readers; the oldest go first.
        keep_tokens: tokens of all trajectories kept for readers.
        keep_s: seconds that results are kept for readers; older ones go when the next result comes.
        grace_s: seconds a RUN stage may go over its time limit to end a tool call in order.
        close_s: seconds a sandbox may take to close.
        drain_s: seconds a graceful stop waits for accepted jobs before it ends them.
        episodes: episodes that callers drive themselves at once; they count as `live` too.
        episode_idle_s: seconds after which one that nobody asks for is closed.
        batches: batches running at once; more are refused until one is over.
        batch_groups: most informative groups a batch may want, and groups it may have under way.
        batch_tasks: most tasks of one batch.
        keep_batches: batches that are over and kept for readers, their groups' statistics with them.
        store: what keeps groups and results, for a service that is served: a file on a local disk, or a
            PostgreSQL database (`postgresql://...`). What is unfinished goes on at the next start. None, or
            `memory`, keeps them for as long as the service runs.
        reasoning: what becomes of a model's earlier reasoning: `keep` keeps it in the context, which only
            grows; `user_turn` lets the chat template drop it where a user speaks, `template` at every turn.
            What is rewritten begins another row of the result.
    """

    init: int = Field(default=4, ge=1)
    run: int = Field(default=32, ge=1)
    eval: int = Field(default=4, ge=1)
    live: int | None = Field(default=None, ge=1)
    attempts: int = Field(default=2, ge=1, le=10)
    queue: int = Field(default=100_000, ge=1)
    keep_results: int = Field(default=100_000, ge=1)
    keep_tokens: int = Field(default=50_000_000, ge=1)
    keep_s: float | None = Field(default=None, gt=0)
    grace_s: float = Field(default=30.0, gt=0)
    close_s: float = Field(default=60.0, gt=0)
    drain_s: float = Field(default=30.0, ge=0)
    episodes: int = Field(default=16, ge=0)
    episode_idle_s: float = Field(default=600.0, gt=0)
    batches: int = Field(default=64, ge=1)
    batch_groups: int = Field(default=4096, ge=1)
    batch_tasks: int = Field(default=20_000, ge=1)
    keep_batches: int = Field(default=64, ge=1)
    store: StoreLocation = DEFAULT_STORE
    reasoning: Literal["keep", "user_turn", "template"] = "keep"


class TenantSettings(_Section):
    """Somebody who shares the service.

    Args:
        token: bearer token of the tenant.
        jobs: unfinished jobs and open episodes it may have.
        batches: batches it may have running at once.
    """

    token: SecretStr = Field(min_length=16)
    jobs: int = Field(default=10_000, ge=1)
    batches: int = Field(default=8, ge=1)


class ServerSettings(_Section):
    """The HTTP server in front of the service.

    Args:
        host: address to bind; anything but loopback needs a token.
        port: TCP port; 0 takes a free one.
        token: bearer token of the control plane; optional on loopback.
        tenants: others who may use it, by name, each with a token and a bound; what belongs to one has an
            id that begins with its name and a slash.
        max_body_bytes: largest request body.
        max_wait_s: longest a request for results waits.
        max_page: most results in one answer.
        paper_routes: whether the routes of the ProRL Agent paper are answered too.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8600, ge=0, le=65_535)
    token: SecretStr | None = Field(default=None, min_length=16)
    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")], TenantSettings] = (
        Field(default={})
    )
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    max_wait_s: float = Field(default=60.0, ge=0)
    max_page: int = Field(default=1000, ge=1)
    paper_routes: bool = True

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach `host`."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class NodeSettings(_Section):
    """Further machines, and further processes of this one, that carry jobs out.

    Args:
        port: TCP port on which they join, 0 a free one; None keeps other machines out, but for Ray's.
        processes: of this machine that carry jobs out, each with an event loop of its own and its share of
            the pools; 0 leaves them to the service's own process.
        host: address to bind; anything but loopback needs a token.
        token: what nodes prove to know, and the service to them.
        head: whether jobs run on the service's own machine too. Episodes that callers drive always do.
        silent_s: seconds without a word after which a node, or to a node the service, counts as lost.
        start_s: seconds a node gets to prepare itself: to load the tokenizer, to try its sandboxes.
        ray: address of a Ray cluster, whose machines then become nodes by themselves: `auto`, or HOST:PORT.
        resource: custom resource of Ray that a machine must have; as much of it as there is runs there at
        once.
            None takes every machine, with the pools of `service`.
        cpus: processors that each node asks Ray for.
    """

    port: int | None = Field(default=None, ge=0, le=65_535)
    processes: int = Field(default=0, ge=0, le=1_024)
    host: str = "127.0.0.1"
    token: SecretStr | None = Field(default=None, min_length=16)
    head: bool = False
    silent_s: float = Field(default=30.0, ge=1.0)
    start_s: float = Field(default=300.0, gt=0)
    ray: str | None = Field(default=None, min_length=1)
    resource: str | None = Field(default=None, min_length=1)
    cpus: float = Field(default=1.0, ge=0)

    @property
    def wanted(self) -> bool:
        """Whether jobs run elsewhere than in the service's own process."""
        return self.port is not None or self.ray is not None or self.processes > 0


class ModelSettings(_Section):
    """The model servers.

    Args:
        servers: base URLs to start with; more can be added while the service runs. One may name its protocol:
            `sglang+http://host:30000`.
        protocol: what servers speak whose URL does not say: `vllm`, `sglang`, `llamacpp`, `auto` (finds out
            which of these), or `openai`, a chat server without token ids, whose trajectories are not for
            training.
        name: model name the servers know, where they ask for one.
        tokenizer: directory with `tokenizer.json` and the chat template.
        tool_format: how the model writes tool calls (`hermes`, `coder`, `glm`, ...); `auto` asks the chat
            template.
    """

    servers: tuple[str, ...] = ()
    protocol: Literal["auto", "vllm", "sglang", "llamacpp", "openai"] = "auto"
    name: str = ""
    tokenizer: ExpandedPath | None = None
    tool_format: str = "auto"


class LimitSettings(_Section):
    """What a sandbox may use, where its task family asks for nothing else; None is no bound.

    Args:
        memory_bytes: of all its processes together.
        processes: that live at a time.
        open_files: of each process.
        cpus: processors' worth of time; kept by control groups alone.
        disk_bytes, disk_files: of what it writes.
        file_bytes: of one file; None takes `disk_bytes`.
        wall_s: seconds after which it is closed.
        reserve_bytes: of the disk below `run_dir`, kept free: below it the sandbox that holds most is ended.
        mechanism: auto, cgroup2, cgroup1 or watchdog.
        nice: by how much sandboxes yield the processors to the service and all others.
    """

    memory_bytes: int | None = Field(default=8 << 30, ge=32 << 20)
    processes: int | None = Field(default=2048, ge=24)
    open_files: int = Field(default=65_536, ge=1024)
    cpus: float | None = Field(default=None, ge=0.01)
    disk_bytes: int | None = Field(default=16 << 30, ge=1 << 20)
    disk_files: int | None = Field(default=1_000_000, ge=100)
    file_bytes: int | None = Field(default=None, ge=1 << 20)
    wall_s: float | None = Field(default=None, ge=0.1)
    reserve_bytes: int = Field(default=1 << 30, ge=0)
    mechanism: Literal["auto", "cgroup2", "cgroup1", "watchdog"] = "auto"
    nice: int = Field(default=10, ge=0, le=19)


class SearchSection(_Section):
    """What the search tool of environments asks. The host asks; no sandbox sees the key.

    Args:
        backend: `index`, an embedded full-text index, or the name of a web service.
        corpus: folder of texts for `index`; None takes the sample.
        url: address of the web service, where it is not the usual one.
        key: of the web service.
        timeout_s: seconds for one answer of it.
    """

    backend: Literal["index", "brave", "serper", "tavily", "searxng"] = "index"
    corpus: ExpandedPath | None = None
    url: str = ""
    key: SecretStr | None = None
    timeout_s: float = Field(default=20.0, gt=0)


class LogSettings(_Section):
    """What a service logs, on its standard error.

    Args:
        level: least level that is logged.
        format: `text` for people, `json` for machines: one object a line, with the job and the trace.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class NemoSettings(_Section):
    """A NeMo Gym resources server behind an environment: one that runs, or one that is started for it.

    Args:
        url: base URL of a server that runs.
        config: YAML file of a server to start: a path, or one in NeMo Gym's own folder, such as
            `resources_servers/mcqa/configs/mcqa.yaml`.
        instance: which resources server of the file; None where it names one.
        overrides: values of its block.
        python: the Python of an environment that has NeMo Gym; None takes this one.
        roots: further folders with `resources_servers/` in them.
        pass_env: environment variables that the started server is given, beside the harmless ones.
        start_s: seconds until a started server must answer.
        finish_tool: the tool whose call ends an episode; "" where an answer without a call does.
        on_error: what an internal error of a tool's route is: `show` it to the model as NeMo Gym's agents do,
            or `fail` the episode.
        connect_s: seconds that reaching the server may take.
        seed_s, call_s, verify_s: seconds each kind of request may take, where the job's limits are not
            shorter.
        tool_bytes: of a tool's answer, what the model is shown.
    """

    url: str | None = None
    config: str | None = None
    instance: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
    python: ExpandedPath | None = None
    roots: tuple[ExpandedPath, ...] = ()
    pass_env: tuple[str, ...] = ()
    start_s: float = Field(default=120.0, gt=0)
    finish_tool: str = ""
    on_error: Literal["show", "fail"] = "show"
    connect_s: float = Field(default=10.0, gt=0)
    seed_s: float = Field(default=600.0, gt=0)
    call_s: float = Field(default=60.0, gt=0)
    verify_s: float = Field(default=900.0, gt=0)
    tool_bytes: int = Field(default=64 * 1024, ge=1)


class SandboxSettings(_Section):
    """What the sandboxes of an environment get instead of the family's own; as far as the family allows.

    Args:
        memory_bytes, processes, open_files, cpus, disk_bytes, disk_files, file_bytes, wall_s: as in
            `LimitSettings`.
        allow: hosts that are reachable.
        image: directory or SIF file.
    """

    memory_bytes: int | None = Field(default=None, ge=32 << 20)
    processes: int | None = Field(default=None, ge=24)
    open_files: int = Field(default=65_536, ge=1024)
    cpus: float | None = Field(default=None, ge=0.01)
    disk_bytes: int | None = Field(default=None, ge=1 << 20)
    disk_files: int | None = Field(default=None, ge=100)
    file_bytes: int | None = Field(default=None, ge=1 << 20)
    wall_s: float | None = Field(default=None, ge=0.1)
    allow: tuple[str, ...] = ()
    image: ExpandedPath | None = None


class ToolSettings(_Section):
    """A tool as an agent is offered it.

    Args:
        tool: the family's own name of it, or `think`, or `apply_patch` where there is an editor; "" where it
            is offered under that.
        description: instead of the tool's own.
        arguments: the arguments on offer, each with the tool's own name of it, or null where it is taken and
            not read; empty: the tool's own.
        optional: a family without it offers the others.
    """

    tool: str = ""
    description: str | None = None
    arguments: dict[str, str | None] = Field(default_factory=dict)
    optional: bool = False


class HarnessSettings(_Section):
    """An agent as others wrote it, which works in the sandbox with tools of its own. What is left empty is
    the recipe's.

    Args:
        recipe: one that is built in; "" is a plain command.
        registry: of the packages to install.
        packages: with exact versions, as the registry's client takes them.
        command: program and arguments, with the names in braces that docs/harnesses.md lists.
        env: further variables.
        files: further files, text by absolute path.
        instruction: what it is told; `{task}` stands for the task's own words.
        stdin: what it reads.
        exits: exit statuses with which it ends in order.
    """

    recipe: str = ""
    registry: Literal["pypi", "npm"] = "pypi"
    packages: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    instruction: str = ""
    stdin: str = ""
    exits: tuple[int, ...] = ()


class AgentSettings(_Section):
    """How the model is met. What an agent says goes over what its environment says.

    Args:
        harness: who works on the tasks instead of the service's own loop: settings, or the name of a recipe.
        system_prompt: first message of the episodes; None takes the environment's.
        tools: by the names that the model calls; None offers the family's own.
        limits: of the agent loop, where a request names none; see `AgentLimits`.
        sampling: how to sample, where a request does not say; see `Sampling`.
    """

    harness: HarnessSettings | None = None
    system_prompt: str | None = Field(default=None, min_length=1)
    tools: dict[str, ToolSettings] | None = None
    limits: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)

    @field_validator("harness", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """`harness: codex` is that recipe as it is."""
        return {"recipe": value} if isinstance(value, str) else value

    @field_validator("tools", mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """`[bash, finish]` are tools under their own names; `run: bash` is another name and no more."""
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            value = {name: name for name in value}
        if not isinstance(value, dict):
            return value
        named = {name: {} if tool is None else tool for name, tool in value.items()}
        return {name: {"tool": tool} if isinstance(tool, str) else tool for name, tool in named.items()}


class EnvironmentSettings(_Section):
    """An environment that is offered under a name.

    Args:
        family: the registered family behind it; None takes the one of the same name.
        nemo: or else the NeMo Gym resources server behind it.
        agent: one of `agents`, or a built-in one, which meets its tasks.
        agents: others that do: each is offered as NAME@AGENT.
        system_prompt: first message of its episodes; None takes the family's.
        sandbox: what its sandboxes get.
        options: the family's own, where it has any; its page names them.
        limits: of the agent loop, where a request names none; see `AgentLimits`.
        sampling: how to sample, where a request does not say; see `Sampling`.
    """

    family: str | None = None
    nemo: NemoSettings | None = None
    agent: str | None = None
    agents: tuple[str, ...] = ()
    system_prompt: str | None = Field(default=None, min_length=1)
    sandbox: SandboxSettings | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    limits: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)


class Settings(_Section):
    """All settings.

    Args:
        cache_dir: node-local directory for what is built once; survives the process. None takes the user's.
        run_dir: directory on a local disk below which sandboxes keep their files while they run; None takes
            the temporary directory.
        driver: what starts sandboxes: `namespaces` (no other program), `bubblewrap`, `apptainer`, `instance`
            (an Apptainer for each sandbox, where there are no user namespaces), `local` (no isolation at
            all), or `auto`, the first of them that works here, `local` left out.
        bwrap: bubblewrap program, which `auto` then takes; None takes the package's, else the system's.
        warm: most sandboxes that stand ready before they are asked for, 3 MB each; 0 keeps none.
        pace: whether fewer sandboxes start at once while they start slowly or memory is short.
        image_cache: directory for images that were built or pulled; may lie on a shared file system. None
            takes `images` in the cache directory.
        image_build_s: seconds that building or pulling one image may take.
        image_build_bytes: most bytes that a compressed archive may unpack to.
        apptainer: Apptainer or SingularityCE program; None takes the first in PATH.
        environments: what is offered, by name; None offers every registered family.
        agents: system prompts, tools and limits, by name, which environments refer to.
    """

    service: ServiceSettings = ServiceSettings()
    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    nodes: NodeSettings = NodeSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    search: SearchSection = SearchSection()
    cache_dir: ExpandedPath | None = None
    run_dir: ExpandedPath | None = None
    driver: Literal["auto", "namespaces", "bubblewrap", "apptainer", "instance", "local"] = "auto"
    bwrap: ExpandedPath | None = None
    warm: int = Field(default=8, ge=0)
    pace: bool = True
    image_cache: ExpandedPath | None = None
    image_build_s: float = Field(default=3600.0, gt=0)
    image_build_bytes: int = Field(default=64 << 30, ge=1)
    apptainer: ExpandedPath | None = None
    environments: dict[str, EnvironmentSettings] | None = None
    agents: dict[str, AgentSettings] = Field(default_factory=dict)

    @field_validator("environments", mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        """`bash:` with nothing behind it is the family as it is."""
        if not isinstance(value, dict):
            return value
        return {name: {} if entry is None else entry for name, entry in value.items()}


def load_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        path: YAML file, or None for the defaults.
        environ: the process environment; variables that begin with PRORL_ count, the others do not.

    Raises:
        InputError: the file cannot be read, a key is unknown or a value is wrong; the hint names the
            closest key.
    """
    values = _read(path) if path else {}
    for name, text in sorted((environ or {}).items()):
        if name.startswith(PREFIX):
            _override(values, name, text)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise InputError(f"{path}: cannot be read: {problem}", hint="--config names a YAML file") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: a mapping of sections is expected, not a {type(values).__name__}")
    return values


def _override(values: dict[str, Any], name: str, text: str) -> None:
    """Set what one environment variable names. Its text is read as YAML, so numbers and lists work; a
    setting that is text in the end (a token of digits, say) stays as it was written."""
    *sections, key = name.removeprefix(PREFIX).lower().split("__")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise InputError(f"{name}: {section} is not a section")
    target[key] = text if _is_text((*sections, key)) else _yaml_value(name, text)


def _is_text(location: tuple[str, ...]) -> bool:
    annotation: Any = Settings
    for part in location:
        field = getattr(annotation, "model_fields", {}).get(part)
        annotation = field.annotation if field else None
    return annotation in (str, ExpandedPath | None, SecretStr | None, StoreLocation | None)


def _yaml_value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        shown = "" if "TENANTS" in name else f": {text!r}"  # tokens are in there
        raise InputError(f"{name}: not a YAML value{shown}") from error


def _explain(error: ValidationError) -> InputError:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    where = ".".join(location)
    if first["type"] != "extra_forbidden":
        return InputError(f"setting {where}: {first['msg']}")
    known = _keys(location[:-1])
    close = difflib.get_close_matches(location[-1], known, n=1)
    hint = f"did you mean {'.'.join([*location[:-1], *close])}?" if close else ""
    return InputError(f"unknown setting {where}", hint=hint or f"known: {', '.join(known)}")


def _keys(sections: list[str]) -> list[str]:
    """The keys of a section."""
    annotation: Any = Settings
    names = iter(sections)
    for section in names:
        inner = annotation.model_fields[section].annotation
        annotation, named = _section_of(inner), "dict[" in str(inner)
        if named:  # a mapping of sections: its keys are anybody's
            next(names, None)
    return sorted(annotation.model_fields)


def _section_of(annotation: Any) -> Any:
    """The section in `Section | None`, `dict[str, Section] | None` or the like."""
    parts = [_section_of(part) for part in get_args(annotation)]
    return next((part for part in (*parts, annotation) if hasattr(part, "model_fields")), None)
