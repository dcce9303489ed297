"""All settings, typed, in one place: a YAML file, overridden by environment variables; read once at startup.

```text
service: {run: 64}          # file
PRORL_SERVICE__RUN=64       # environment: sections and settings joined by two underscores
```
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

from prorl_envs.errors import InputError, expand_user

PREFIX = "PRORL_"

ExpandedPath = Annotated[Path, AfterValidator(expand_user)]

#: Default store of `prorl-envs serve`; and the value that selects a store in memory instead.
DEFAULT_STORE, IN_MEMORY = Path("runs/service.db"), "memory"


def _store(value: object) -> object:
    if value == IN_MEMORY:
        return None
    return expand_user(value) if isinstance(value, str) else value


#: A file; None means memory.
StoreLocation = Annotated[Path | None, BeforeValidator(_store)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RetentionSettings(_Section):
    """Finished work that a service keeps for readers.

    Args:
        max_results: maximum stored results. Beyond it, the oldest results are deleted if they were
            [read](http-api.md#read-results); with `store: memory`, also if they were not
        max_tokens: maximum tokens of the stored results; beyond it, results are deleted as for `max_results`
        max_batches: maximum stored finished batches, with the statistics of their groups; batches with unread
            results are kept in addition
    """

    max_results: int = Field(default=100_000, ge=1)
    max_tokens: int = Field(default=50_000_000, ge=1)
    max_batches: int = Field(default=64, ge=1)

    @property
    def of_results(self) -> dict[str, Any]:
        """The bounds of stored results, as keyword arguments of a store."""
        return self.model_dump(exclude={"max_batches"})


class ServiceSettings(_Section):
    """The rollout service.

    Args:
        init: maximum active jobs in INIT
        run: maximum active jobs in RUN
        eval: maximum active jobs in EVAL
        max_jobs_with_sandbox: maximum jobs that hold a sandbox, including those that wait between stages;
            default: the sum of the three. Limits of the process can lower it
        attempts: maximum attempts of a job, including the first; a job is tried again if the infrastructure
            fails
        queue: maximum accepted, unfinished jobs; more are refused
        grace_s: seconds that RUN may exceed its time limit to complete a tool call
        close_s: seconds that a sandbox may take to close
        drain_s: seconds that a stopping service waits for accepted jobs before it cancels them
        episodes: maximum [episodes that clients drive themselves](http-api.md#episodes-step-by-step); they
            also count towards `max_jobs_with_sandbox`
        episode_idle_s: seconds without a request after which such an episode is closed
        batches: maximum running [batches](batches.md); more are refused
        batch_groups: maximum informative groups that a batch may request, and maximum groups that it may run
            at once
        batch_tasks: maximum tasks of one batch
        retention: finished work that is kept for readers.
        store: store of `serve`: a file; `memory` is lost at a restart
        reasoning: a model's reasoning from earlier turns: `keep` leaves it in the context, which is then
            never rewritten; otherwise the chat template may remove it at a user message (`user_turn`) or at
            every turn (`template`). A rewritten context starts another row: `forks` of the result
        require_audit: [record of an audit](audit.md) that tasks must have passed; others are refused
    """

    init: int = Field(default=4, ge=1)
    run: int = Field(default=32, ge=1)
    eval: int = Field(default=4, ge=1)
    max_jobs_with_sandbox: int | None = Field(default=None, ge=1)
    attempts: int = Field(default=2, ge=1, le=10)
    queue: int = Field(default=100_000, ge=1)
    grace_s: float = Field(default=30.0, gt=0)
    close_s: float = Field(default=60.0, gt=0)
    drain_s: float = Field(default=30.0, ge=0)
    episodes: int = Field(default=16, ge=0)
    episode_idle_s: float = Field(default=600.0, gt=0)
    batches: int = Field(default=64, ge=1)
    batch_groups: int = Field(default=4096, ge=1)
    batch_tasks: int = Field(default=20_000, ge=1)
    retention: RetentionSettings = RetentionSettings()
    store: StoreLocation = DEFAULT_STORE
    reasoning: Literal["keep", "user_turn", "template"] = "keep"
    require_audit: ExpandedPath | None = None


class TenantSettings(_Section):
    """A tenant of the service.

    Args:
        token: bearer token of the tenant.
        jobs: maximum unfinished jobs and open episodes of the tenant.
        batches: maximum running batches of the tenant.
    """

    token: SecretStr = Field(min_length=16)
    jobs: int = Field(default=10_000, ge=1)
    batches: int = Field(default=8, ge=1)


class ServerSettings(_Section):
    """The HTTP server in front of the service.

    Args:
        host: address to bind; any address but loopback requires a token
        port: TCP port; 0 uses a free one
        token: bearer token that requests must have, 16 characters or more; on loopback one is generated if
            none is set
        generate_token: generate the token on loopback: [who may do what](http-api.md#who-may-do-what). If
            false, or with `serve --no-token`, every user of the machine has access on loopback
        tenants: other users of the service: by name, a `token` and quotas of unfinished `jobs` (10000) and
            running `batches` (8): [who may do what](http-api.md#who-may-do-what)
        max_connections: maximum open connections, at most half of the process's descriptors. At the limit, a
            new connection replaces the one that has waited longest for a request, or gets 503 if all are busy
        head_timeout_s: seconds to receive the head of a request, from the opening of the connection or, for a
            later request, from its first byte
        body_timeout_s: seconds to receive the body of a request, from the end of its head
        keep_alive_s: seconds that a connection may be idle between two requests
        max_body_bytes: maximum size of a request body
        max_wait_s: maximum wait of a request for results
        max_page: maximum results in one response
        paper_routes: serve [the routes of the ProRL Agent paper](http-api.md#the-papers-routes) too
        paper_sources: environment by `data_source` of these routes, in addition to the [built-in
            names](paper-clients.md#data-sources); a final `*` matches any suffix
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8600, ge=0, le=65_535)
    token: SecretStr | None = Field(default=None, min_length=16)
    generate_token: bool = True
    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")], TenantSettings] = (
        Field(default={})
    )
    max_connections: int = Field(default=4096, ge=8)
    head_timeout_s: float = Field(default=10.0, gt=0)
    body_timeout_s: float = Field(default=120.0, gt=0)
    keep_alive_s: float = Field(default=120.0, gt=0)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    max_wait_s: float = Field(default=60.0, ge=0)
    max_page: int = Field(default=1000, ge=1)
    paper_routes: bool = True
    paper_sources: dict[str, str] = Field(default={})

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach `host`."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class NodeSettings(_Section):
    """Machines of a Ray cluster that run jobs.

    Args:
        ray: address of a Ray cluster whose machines become nodes: `auto`, or HOST:PORT. Needs the extra
            `ray`. Without it, all jobs run in the service's own process
        resource: custom Ray resource that a machine must have; its amount is the number of jobs at once on
            that machine. Without it every other machine of the cluster is used, each with the pools of
            `service`
        actors: processes on each machine, each with an event loop of its own and its share of the pools and
            of `sandbox.warm_pool_size`: see [many cores](scale.md#many-cores)
        cpus: processors that each process requests from Ray
        run_on_head: run jobs in the service's own process too. Episodes whose caller opens a model endpoint
            always run there
        heartbeat_timeout_s: seconds without an answer after which a node (or, for a node, the service) is
            lost
        start_s: seconds for a node to start, load the tokenizer and test its sandboxes
    """

    ray: str | None = Field(default=None, min_length=1)
    resource: str | None = Field(default=None, min_length=1)
    actors: int = Field(default=1, ge=1, le=1_024)
    cpus: float = Field(default=1.0, ge=0)
    run_on_head: bool = False
    heartbeat_timeout_s: float = Field(default=30.0, ge=1.0)
    start_s: float = Field(default=300.0, gt=0)


class ModelSettings(_Section):
    """The model servers.

    Args:
        servers: base URLs of the model servers at the start of `prorl-envs serve`; `--llm` overrides it. A
            URL can name its protocol: `sglang+http://host:30000`
        protocol: protocol of servers whose URL names none: `vllm`, `sglang`, `llamacpp`, `auto` (detects one
            of these), or `openai`, a chat server without token ids, whose trajectories are marked and never
            used for training
        name: model name on the servers; `--model` overrides it
        tokenizer: folder with the model's `tokenizer.json` and chat template; `--tokenizer` overrides it
        tool_format: format of the model's tool calls: `auto` detects it from the chat template; or `hermes`,
            `coder`, `glm`, `deepseek`, `dsml`, `minimax`, `kimi`, `mistral`, `gemma`, `functiongemma`,
            `harmony`, `llama`, `pythonic`
        ca_file: PEM file of the certificates that verify `https://` servers, instead of those of the public
            authorities: [TLS](connect.md#keys-and-tls)
    """

    servers: tuple[str, ...] = ()
    protocol: Literal["auto", "vllm", "sglang", "llamacpp", "openai"] = "auto"
    name: str = ""
    tokenizer: ExpandedPath | None = None
    tool_format: str = "auto"
    ca_file: ExpandedPath | None = None


class LimitSettings(_Section):
    """Default sandbox limits, for task families that set none; None means no limit.

    Args:
        memory_bytes: memory of all processes of a sandbox together, including files in memory
        processes: simultaneous processes in a sandbox
        open_files: open files per process
        cpus: processor time, in processors; enforced only by control groups, not by the watchdog
        disk_bytes: disk space of a sandbox's own files
        disk_files: files and directories that a sandbox may create
        file_bytes: size of one file; default: `limits.disk_bytes`
        lifetime_s: lifetime of a sandbox in seconds
        reserve_bytes: free disk space below `run_dir`; if less is free, the sandbox that uses the most is
            killed
        enforcement: method of enforcing the limits: `cgroup2` uses control groups, `watchdog` needs none;
            `auto` uses `cgroup2` if it is delegated. `prorl-envs doctor` shows which is used
        nice: `nice` value of sandboxes, 0 to 19; higher values give priority to the service and other
            programs
    """

    memory_bytes: int | None = Field(default=8 << 30, ge=32 << 20)
    processes: int | None = Field(default=2048, ge=24)
    open_files: int = Field(default=65_536, ge=1024)
    cpus: float | None = Field(default=None, ge=0.01)
    disk_bytes: int | None = Field(default=16 << 30, ge=1 << 20)
    disk_files: int | None = Field(default=1_000_000, ge=100)
    file_bytes: int | None = Field(default=None, ge=1 << 20)
    lifetime_s: float | None = Field(default=None, ge=0.1)
    reserve_bytes: int = Field(default=1 << 30, ge=0)
    enforcement: Literal["auto", "cgroup2", "watchdog"] = "auto"
    nice: int = Field(default=10, ge=0, le=19)


class SandboxSection(_Section):
    """Start of sandboxes.

    Args:
        warm_pool_size: maximum size of the warm pool, 2.5 MB per sandbox; 0 disables it
        max_concurrent_starts: maximum sandboxes that start at once; others wait. Default: four per processor
    """

    warm_pool_size: int = Field(default=8, ge=0)
    max_concurrent_starts: int | None = Field(default=None, ge=1)


class SearchSection(_Section):
    """Backend of the environments' search tool. The host sends the queries; no sandbox sees the key.

    Args:
        backend: `index`, an embedded full-text index, or a web service: `brave`, `serper`, `tavily`,
            `searxng`
        corpus: folder of `.txt`, `.md` and `.jsonl` files for `index`; default: the sample
        url: address of the web service, if it is not the usual one; required for `searxng`
        key: key of the web service
        timeout_s: seconds for one answer of the web service
    """

    backend: Literal["index", "brave", "serper", "tavily", "searxng"] = "index"
    corpus: ExpandedPath | None = None
    url: str = ""
    key: SecretStr | None = None
    timeout_s: float = Field(default=20.0, gt=0)


class LogSettings(_Section):
    """Log of a service, on its standard error.

    Args:
        level: lowest level that is logged: `debug`, `info`, `warning` or `error`
        format: `text` for people, or `json`: one object per line, with its job and trace
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class NemoSettings(_Section):
    """A running NeMo Gym resources server behind an environment.

    Args:
        url: base URL of the server
        finish_tool: the tool whose call ends an episode
        on_error: an internal error of a tool: `show` it to the model, or `fail` the episode
        connect_s: seconds to connect to the server
        seed_s: seconds to start a session
        call_s: seconds for a tool call, if it has no other limit
        verify_s: seconds for a grade
        tool_bytes: maximum bytes of a tool's answer shown to the model
    """

    url: str = ""
    finish_tool: str = ""
    on_error: Literal["show", "fail"] = "show"
    connect_s: float = Field(default=10.0, gt=0)
    seed_s: float = Field(default=600.0, gt=0)
    call_s: float = Field(default=60.0, gt=0)
    verify_s: float = Field(default=900.0, gt=0)
    tool_bytes: int = Field(default=64 * 1024, ge=1)


class ImagesSection(_Section):
    """Layered images: pulls from registries, and builds of Dockerfiles, both without Apptainer.

    Args:
        layers_dir: directory for unpacked layers, on a local disk; default: `layers` in `cache_dir`.
        bases: local images by reference, such as `ubuntu:24.04`, used in place of a registry: directories,
            SIF files, `.layers.json` files.
        mirrors: by registry, the mirrors to try before it, in order: `host:port`, or `host/prefix`.
        insecure: registries, with their ports, to connect to by plain HTTP.
        allow: hosts that builds can reach, in the forms of `Network.allow`.
    """

    layers_dir: ExpandedPath | None = None
    bases: dict[str, ExpandedPath] = Field(default_factory=dict)
    mirrors: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    insecure: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()


class SandboxSettings(_Section):
    """Overrides of the family's sandbox settings for one environment, as far as the family allows.

    Args:
        memory_bytes, processes, open_files, cpus, disk_bytes, disk_files, file_bytes, lifetime_s: as in
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
    lifetime_s: float | None = Field(default=None, ge=0.1)
    allow: tuple[str, ...] = ()
    image: ExpandedPath | None = None


class ToolSettings(_Section):
    """A tool that an agent offers to the model.

    Args:
        tool: the family's name of the tool; or `think`; or `apply_patch`, if there is an editor; default: the
            offered name
        description: replaces the tool's own description
        arguments: the tool's own name of each offered argument, or null for an argument that is accepted and
            ignored; default: the tool's own arguments
        optional: omit the tool if a family does not have it
    """

    tool: str = ""
    description: str | None = None
    arguments: dict[str, str | None] = Field(default_factory=dict)
    optional: bool = False


class HarnessSettings(_Section):
    """External agent program that works in the sandbox with its own tools. Empty fields take recipe values.

    Args:
        recipe: a built-in recipe; default: a plain command
        registry: registry of the packages to install: `pypi` or `npm`
        packages: packages with exact versions, instead of the recipe's
        command: program and arguments, instead of the recipe's
        env: additional environment variables
        files: additional files, text by absolute path
        instruction: its prompt; `{task}` stands for the text of the task
        stdin: its standard input
        exits: exit statuses that mean success, instead of 0
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
    """Agent configuration. Agent settings override the environment's.

    Args:
        harness: program that works on the tasks instead of the service's own loop: the name of a recipe, or a
            mapping: [harnesses](harnesses.md)
        system_prompt: first message of the episodes; default: the environment's
        tools: offered tools, by the names that the model calls; default: the family's own. A list of names,
            `NAME: TOOL` pairs, or an entry for each tool:
        limits: limits of the agent loop, if a request sets none: [list](agents.md#limits)
        sampling: sampling, if a request sets none: `temperature`, `top_p`, `max_tokens`, `seed`
    """

    harness: HarnessSettings | None = None
    system_prompt: str | None = Field(default=None, min_length=1)
    tools: dict[str, ToolSettings] | None = None
    limits: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)

    @field_validator("harness", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """Expand `harness: codex` to the recipe of that name, unchanged."""
        return {"recipe": value} if isinstance(value, str) else value

    @field_validator("tools", mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """Expand short forms: `[bash, finish]` keeps the tools' names; `run: bash` only renames a tool."""
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            value = {name: name for name in value}
        if not isinstance(value, dict):
            return value
        named = {name: {} if tool is None else tool for name, tool in value.items()}
        return {name: {"tool": tool} if isinstance(tool, str) else tool for name, tool in named.items()}


class EnvironmentSettings(_Section):
    """An environment that is offered under a name.

    Args:
        family: the registered family; default: the one with the entry's name
        nemo: a NeMo Gym resources server, instead of a family
        agent: its agent: one of `agents`, or the built-in `codeact`
        agents: additional agents; each is offered as `NAME@AGENT`
        system_prompt: first message of its episodes
        python: `kernel` runs the `ipython` tool in a Jupyter kernel of the sandbox's own `python3`, and adds
            the tool to a family without it:
            [Python sessions](environments.md#python-sessions). Default: the family's own
        sandbox: overrides for its sandboxes, if the family allows them: the limits of a sandbox (except
            `reserve_bytes` and `enforcement`), `allow` (hosts that can be reached), `image`
        options: options of the family; see its page
        limits: limits of the agent loop, if a request sets none: [list](agents.md#limits)
        sampling: sampling, if a request sets none: `temperature`, `top_p`, `max_tokens`, `seed`
    """

    family: str | None = None
    nemo: NemoSettings | None = None
    agent: str | None = None
    agents: tuple[str, ...] = ()
    system_prompt: str | None = Field(default=None, min_length=1)
    python: Literal["kernel"] | None = None
    sandbox: SandboxSettings | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    limits: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)


class Settings(_Section):
    """All settings.

    Args:
        sandbox: start of sandboxes.
        cache_dir: directory of files that are built once and kept (SWE-bench environments, 30 MB each);
            default: `prorl-envs` in `$XDG_CACHE_HOME` or `~/.cache`
        run_dir: directory of running sandboxes, on a local disk, with a path of at most 64 bytes, not mounted
            noexec; default: the temporary directory, or `/tmp` or `/var/tmp` if that is unsuitable
        driver: driver that starts sandboxes: `bubblewrap`; `apptainer` (Apptainer or SingularityCE);
            `apptainer-instance` (an Apptainer for each sandbox, for machines without user namespaces);
            `local`, which isolates nothing; or `auto`, the first that works here (never `local`).
            `prorl-envs --driver NAME COMMAND` overrides it
        bwrap: the bubblewrap program; default: the one of this package, or else the system's
        image_cache: directory of built and pulled images, which nodes may share; default: `images` in
            `cache_dir`
        image_build_s: seconds that building or pulling one image may take
        image_build_bytes: maximum unpacked bytes of a compressed archive
        apptainer: the Apptainer or SingularityCE program; default: `apptainer` or `singularity` in `PATH`
        environments: offered environments, by name; default: every registered family: [below](#environments)
        agents: agents, by name: [below](#agents)
    """

    service: ServiceSettings = ServiceSettings()
    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    nodes: NodeSettings = NodeSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    sandbox: SandboxSection = SandboxSection()
    search: SearchSection = SearchSection()
    images: ImagesSection = ImagesSection()
    cache_dir: ExpandedPath | None = None
    run_dir: ExpandedPath | None = None
    driver: Literal["auto", "bubblewrap", "apptainer", "apptainer-instance", "local"] = "auto"
    bwrap: ExpandedPath | None = None
    image_cache: ExpandedPath | None = None
    image_build_s: float = Field(default=3600.0, gt=0)
    image_build_bytes: int = Field(default=64 << 30, ge=1)
    apptainer: ExpandedPath | None = None
    environments: dict[str, EnvironmentSettings] | None = None
    agents: dict[str, AgentSettings] = Field(default_factory=dict)

    @field_validator("environments", mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        """Expand `bash:` without a value to the family with its defaults."""
        if not isinstance(value, dict):
            return value
        return {name: {} if entry is None else entry for name, entry in value.items()}


def load_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        path: YAML file, or None for the defaults.
        environ: the process environment; only variables that start with PRORL_ are used.

    Raises:
        InputError: the file cannot be read, a key is unknown or a value is wrong; the message names the file
            or the variable, the hint the closest key.
    """
    values = _read(path) if path else {}
    variables = {}
    for name, text in sorted((environ or {}).items()):
        if name.startswith(PREFIX):
            variables[_override(values, name, text)] = name
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        location = tuple(str(part) for part in error.errors()[0]["loc"])
        named = [name for setting, name in variables.items() if setting == location[: len(setting)]]
        raise _explain(error, named[0] if named else str(path or "the settings")) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"{path}: cannot be read: {problem}", hint="--config names a YAML file") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: a mapping of sections is expected, not a {type(values).__name__}")
    return values


def _override(values: dict[str, Any], name: str, text: str) -> tuple[str, ...]:
    """Set the setting that an environment variable names; return the location of the setting.

    The value is parsed as YAML, so numbers and lists work. For a setting of type text, such as a token of
    digits, the value is used unparsed.
    """
    *sections, key = name.removeprefix(PREFIX).lower().split("__")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise InputError(f"{name}: {section} is not a section")
    target[key] = text if _is_text((*sections, key)) else _yaml_value(name, text)
    return (*sections, key)


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
        shown = "" if "TENANTS" in name else f": {text!r}"  # tenant settings contain tokens
        raise InputError(f"{name}: not a YAML value{shown}") from error


def _explain(error: ValidationError, source: str) -> InputError:
    """Return the first validation problem as an error that names the source of the settings."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    where = ".".join(location)
    if first["type"] != "extra_forbidden":
        return InputError(f"{source}: setting {where}: {first['msg']}")
    known = _keys(location[:-1])
    close = difflib.get_close_matches(location[-1], known, n=1)
    hint = f"did you mean {'.'.join([*location[:-1], *close])}?" if close else ""
    return InputError(f"{source}: unknown setting {where}", hint=hint or f"known: {', '.join(known)}")


def _keys(sections: list[str]) -> list[str]:
    """Return the keys of a section."""
    annotation: Any = Settings
    names = iter(sections)
    for section in names:
        inner = annotation.model_fields[section].annotation
        annotation, named = _section_of(inner), "dict[" in str(inner)
        if named:  # skip the key of a mapping of sections: it is user-defined
            next(names, None)
    return sorted(annotation.model_fields)


def _section_of(annotation: Any) -> Any:
    """Return the section in `Section | None`, `dict[str, Section] | None` or the like."""
    parts = [_section_of(part) for part in get_args(annotation)]
    return next((part for part in (*parts, annotation) if hasattr(part, "model_fields")), None)
