"""Compose settings of the agent's service: each is applied, harmless, or a reason why the task cannot run."""

import re
from typing import Any

import pytest

from prorl_envs.env.node import Node
from prorl_envs.envs.terminal.env import TerminalEnvironment
from prorl_envs.envs.terminal.requirements import missing
from prorl_envs.envs.terminal.rows import task_of
from prorl_envs.envs.terminal.task import NetworkAccess, TerminalTask
from prorl_envs.errors import InputError
from prorl_envs.images.registry.documents import host_platform

from .conftest import MakeRow
from .test_env import episode, graded
from .test_terminal_bench import row

PATH = "environment/docker-compose.yaml"
FILES = {
    "environment/vars.env": "# a comment\nexport A=1 # one\nB='$A'\nC=\"x\\n${A}\"\nD=${A:-2}${NONE:-3}\nE\n",
    "environment/.env": "LEVEL=high\n",
    "environment/docker/Dockerfile.dev": "FROM base AS one\nARG V\nFROM one AS two\n",
}


def composed(make_row: MakeRow, service: str, config: str = "", top: str = "") -> TerminalTask:
    text = f"{top}\nservices:\n  main: {service}\n"
    return task_of(make_row({**FILES, PATH: text}, config=config), {"USER_KEY": "given"})


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        ("{environment: {MODE: strict, N: 3, B: true, NONE: }}", {"MODE": "strict", "N": "3", "B": "true"}),
        ("{environment: {ON: yes, T: 12:30, D: 2024-01-02}}", {"ON": "yes", "T": "12:30", "D": "2024-01-02"}),
        ("{environment: [A=1=2, NONE, USER_KEY]}", {"A": "1=2", "USER_KEY": "given"}),
        ("{environment: {A: 'x${LEVEL}y$LEVEL', B: '$${A}'}}", {"A": "xhighyhigh", "B": "${A}"}),
        ("{environment: {A: '${NO:-${NO-d}}', B: '${LEVEL:+p}${NO+q}'}}", {"A": "d", "B": "p"}),
        ("{env_file: vars.env}", {"A": "1", "B": "$A", "C": "x\n1", "D": "13"}),
        ("{env_file: [{path: vars.env, format: raw}], environment: {A: 5, B: '', C: '', D: ''}}",
         {"A": "5", "B": "", "C": "", "D": ""}),
        ("{env_file: [{path: no.env, required: false}]}", {}),
    ],
)  # fmt: skip
def test_variables(make_row: MakeRow, service: str, expected: dict[str, str]) -> None:
    assert composed(make_row, service).machine.env == expected


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        ("{build: .}", {"folder": "environment", "dockerfile": ""}),
        ("{build: {args: {V: a}, target: two}}", {"build_args": {"V": "a"}, "build_target": "two"}),
        ("{build: {args: [A=1, LEVEL, NO]}}", {"build_args": {"A": "1", "LEVEL": "high"}}),
        ("{build: {context: '${CONTEXT_DIR}/docker', dockerfile: Dockerfile.dev}}",
         {"folder": "environment/docker", "dockerfile": "environment/docker/Dockerfile.dev"}),
        ("{build: {context: ..}}", {"folder": "."}),
        ("{image: 'python:3', working_dir: /srv, hostname: box}",
         {"image": "", "workdir": "/srv", "hostname": "box"}),
        ("{mem_limit: 512m, cpus: 0.5}", {"memory_bytes": 512 << 20, "cpus": 0.5}),
        ("{deploy: {resources: {limits: {cpus: '2', memory: 1.5G}}}}", {"memory_bytes": 3 << 29, "cpus": 2}),
        ("{deploy: {resources: {limits: {cpus: '${CPUS}', memory: '${MEMORY}'}}}}", {"memory_bytes": None}),
        ("{network_mode: none}", {"network": NetworkAccess()}),
        ("{networks: [closed]}", {"network": NetworkAccess()}),
        ("{networks: {open: }}", {"network": NetworkAccess(mode="public")}),
    ],
)  # fmt: skip
def test_applied_settings(make_row: MakeRow, service: str, expected: dict[str, Any]) -> None:
    top = "networks: {closed: {internal: true}, open: {}}"
    machine = composed(make_row, service, top=top).machine
    assert {name: getattr(machine, name) for name in expected} == expected
    assert machine.unsupported == ()


def test_the_task_configuration_takes_precedence(make_row: MakeRow) -> None:
    config = '[environment]\nworkdir = "/w"\ncpus = 1\ndocker_image = "a"\n'
    config += '[environment.env]\nA = "toml"\nT = "${LEVEL}"\n'
    service = "{working_dir: /c, cpus: 2, image: b, environment: {A: compose, B: '${A}'}}"
    machine = composed(make_row, service, config).machine
    assert (machine.workdir, machine.cpus, machine.image) == ("/w", 2, "b")
    assert machine.env == {"A": "toml", "B": "toml", "T": "${LEVEL}"}


@pytest.mark.parametrize(
    "service",
    [
        "{container_name: '${NO}', labels: [a], logging: {}, tty: true, restart: always, ports: ['1:1']}",
        "{x-y: 1, command: [sh, -c, sleep infinity], entrypoint: [], privileged: false, user: '0:0'}",
        "{command: tail -f /dev/null, user: root, shm_size: 1g, init: true, stdin_open: true}",
        "{command: /bin/bash, entrypoint: 'sh -c \"sleep infinity\"'}",
        "{volumes: ['${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}'], tmpfs: ['/tmp:size=1g', /run]}",
        "{security_opt: ['no-new-privileges:true'], healthcheck: {test: a}, deploy: {replicas: 1}, cpus: 0}",
        f"{{platform: {host_platform()}, build: {{context: ., tags: [a], platforms: [{host_platform()}]}}}}",
    ],
)
def test_settings_without_an_effect_are_ignored(make_row: MakeRow, service: str) -> None:
    assert missing(composed(make_row, service), {}) == ()


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        *((f"{name}: {value}", f"services.main.{name}") for name, value in {
            "user": "app", "command": "nginx", "entrypoint": "[python3, -m, http.server]",
            "cap_add": "[SYS_PTRACE]", "cap_drop": "[ALL]", "read_only": "true", "ulimits": "{nofile: 10}",
            "sysctls": "{a: 1}", "pid": "host", "secrets": "[a]", "configs": "[a]", "extends": "{service: b}",
            "extra_hosts": "['a:1.2.3.4']",
            "network_mode": "host", "networks": "{default: {aliases: [a]}}", "profiles": "[a]",
            "post_start": "[a]",
            "platform": "linux/other", "runtime": "nvidia", "volumes": "['./data:/data:ro']", "tmpfs": "/app",
            "security_opt": "['seccomp:unconfined']", "group_add": "[a]", "unknown": "1", "pids_limit": "50",
            "volumes_from": "[a]", "storage_opt": "{size: 1G}", "mac_address": "a", "scale": "2",
        }.items()),
        ("build: {additional_contexts: {a: b}}", "services.main.build.additional_contexts"),
        ("build: {dockerfile_inline: FROM base}", "services.main.build.dockerfile_inline"),
        ("build: {unknown: 1}", "services.main.build.unknown"),
        ("deploy: {replicas: 2}", "services.main.deploy.replicas"),
        ("deploy: {resources: {limits: {pids: 5}}}", "services.main.deploy.resources.limits.pids"),
        ("deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}}", "it needs a GPU"),
        ("gpus: all", "it needs a GPU"),
        ("devices: [{source: /dev/fuse}]", "it needs the device /dev/fuse"),
        ("environment: {A: '${NO}'}", "the variable NO has no value"),
        ("environment: {A: '${NO:?message}'}", "the variable NO has no value"),
    ],
)  # fmt: skip
def test_other_settings_are_reasons(make_row: MakeRow, setting: str, reason: str) -> None:
    task = composed(make_row, f"{{{setting}}}")
    (found,) = missing(task, {})
    assert reason in found and TerminalEnvironment.unavailable(task) == found
    same = row(**{"docker-compose.yaml": f"services: {{client: {{{setting}}}}}\n"})
    assert [reason.replace("main", "client") in text for text in missing(task_of(same), {})] == [True]


@pytest.mark.parametrize(
    "service",
    [
        "3",
        "{environment: {A: '$('}}",
        "{environment: {A: '${B'}}",
        "{env_file: no.env}",
        "{env_file: ../../secret}",
        "{build: https://example.org/a.git}",
        "{build: /etc}",
        "{build: {args: [[a]]}}",
        "{mem_limit: many}",
        "{cpus: many}",
        "{hostname: 'a b'}",
        "{volumes: {}, devices: 1}",
        "{networks: 1}",
    ],
)
def test_malformed_values_name_the_file_and_the_setting(make_row: MakeRow, service: str) -> None:
    with pytest.raises(InputError, match=rf"^{PATH}: services"):
        composed(make_row, service)


def with_service(make_row: MakeRow, service: str, more: str = "") -> TerminalTask:
    text = f"services:\n  main: {{build: .}}\n  db: {service}\n{more}"
    return task_of(make_row({**FILES, PATH: text}), {})


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        ("{build: .}", {"entrypoint": None, "command": None, "restarts": 0}),
        ("{image: a, command: 'run \"a b\" $$X'}", {"command": ("run", "a b", "$X")}),
        ("{image: a, entrypoint: '', command: []}", {"entrypoint": (), "command": ()}),
        ("{image: a, restart: always}", {"always": True, "restarts": None}),
        ("{image: a, restart: 'on-failure:3'}", {"always": False, "restarts": 3}),
        ("{image: a, restart: no}", {"always": False, "restarts": 0}),
        ("{image: a, healthcheck: {test: a b, interval: 1m30s, timeout: 5ms, retries: 5, start_period: 0s}}",
         {"healthcheck": {"test": ("CMD-SHELL", "a b"), "interval_s": 90, "timeout_s": 0.005, "retries": 5}}),
        ("{image: a, healthcheck: {test: [CMD, a, '${LEVEL}']}}",
         {"healthcheck": {"test": ("CMD", "a", "high")}}),
        ("{image: a, healthcheck: {disable: true, test: a}}", {"healthcheck": {"test": ("NONE",)}}),
        ("{image: a, depends_on: [main, b], links: [c, 'b:b']}",
         {"depends_on": {"b": "service_started", "c": "service_started"}}),
        ("{image: a, depends_on: {b: {condition: service_healthy, restart: true}, no: {required: false}}}",
         {"depends_on": {"b": "service_healthy"}}),
        ("{image: a, volumes: [./vars.env:/a.env:ro, './docker:/d', {type: bind, source: .env, target: /e}]}",
         {"files": {"/a.env": "environment/vars.env", "/e": "environment/.env",
                    "/d/Dockerfile.dev": "environment/docker/Dockerfile.dev"}}),
    ],
)  # fmt: skip
def test_settings_of_other_services(make_row: MakeRow, service: str, expected: dict[str, Any]) -> None:
    task = with_service(make_row, service, "  b: {image: x}\n  c: {image: x}\n")
    assert missing(task, {}) == ()
    assert {name: getattr(task.machine.services[0], name) for name in expected} == expected


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        ("{build: {context: ./docker, dockerfile: Dockerfile.dev, target: two}, image: c}",
         {"folder": "environment/docker", "image": "", "build_target": "two"}),
        ("{image: mine}",
         {"folder": "environment/docker", "dockerfile": "environment/docker/Dockerfile.dev"}),
        ("{image: '${MAIN_IMAGE_NAME}'}", {"folder": "environment", "image": ""}),
        ("{image: a, volumes: ['v:/var/v', /w, 'u:/u:ro'], tmpfs: [/t]}",
         {"folders": {"/var/v", "/w", "/u", "/t"}}),
        ("{image: a, networks: [back]}", {"networks": {"back": ("db",)}, "network": NetworkAccess()}),
        ("{image: a, networks: {back: {aliases: [x.y]}, front: }, container_name: n}",
         {"networks": {"back": ("db", "x.y", "n"), "front": ("db", "n")},
          "network": NetworkAccess(mode="public")}),
        ("{image: a, network_mode: none}", {"networks": {}}),
        ("{image: a, working_dir: /w, hostname: h, mem_limit: 1g, env_file: vars.env, environment: {A: 3}}",
         {"workdir": "/w", "hostname": "h", "memory_bytes": 1 << 30,
          "env": {"A": "3", "B": "$A", "C": "x\n1", "D": "13"}}),
        ("{image: a, user: postgres, cap_drop: [ALL], read_only: true, ulimits: {nofile: 1}, pids_limit: 9}",
         {}),
    ],
)  # fmt: skip
def test_machines_of_other_services(make_row: MakeRow, service: str, expected: dict[str, Any]) -> None:
    more = "  b: {build: {context: ./docker, dockerfile: Dockerfile.dev}, image: mine}\n"
    task = with_service(make_row, service, f"{more}networks: {{back: {{internal: true}}, front: {{}}}}\n")
    assert missing(task, {}) == ()
    machine = task.machine.services[0]
    found = {name: getattr(machine, name) for name in expected}
    assert {name: set(value) if name == "folders" else value for name, value in found.items()} == expected


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        *((f"{{image: a, {setting}}}", f"services.db.{setting.partition(':')[0]}: cannot be applied here")
          for setting in (
              "cap_add: [NET_ADMIN]", "network_mode: host", "network_mode: 'service:main'", "pid: host",
              "networks: {default: {ipv4_address: 10.0.0.1}}", "networks: [out]", "links: ['main:other']",
              "extra_hosts: ['a:1.2.3.4']", "secrets: [a]", "volumes: ['/var/run/docker.sock:/s']",
              "volumes: ['../../x:/x']", "volumes: ['gone:/x']", "volumes: ['a:/']", "post_start: [a]",
              "volumes: ['${HOST_AGENT_LOGS_PATH}:/logs/agent']", "scale: 2", "unknown: 1",
          )),
        ("{image: a, healthcheck: {unknown: 1}}", "services.db.healthcheck.unknown: cannot be applied here"),
        ("{}", "services.db: neither image nor build"),
        ("{image: a, privileged: true}", "the service db needs a privileged container"),
        ("{image: a, gpus: all}", "the service db needs a GPU"),
        ("{image: a, volumes: ['v:/v']}\n  b: {image: a, volumes: ['v:/w']}", "volumes.v: shared by"),
        ("{image: a, volumes: ['./d:/v']}\n  b: {image: a, volumes: ['./d:/w:ro']}",
         "volumes../environment/d: shared by services"),
        ("{build: ./none}", "environment/none/Dockerfile: missing"),
        ("{image: a, environment: {A: '${NO}'}}", "the variable NO has no value"),
    ],
)  # fmt: skip
def test_reasons_of_other_services(make_row: MakeRow, service: str, reason: str) -> None:
    top = "networks: {out: {external: true}}\nvolumes: {gone: {external: true}, v: {}}\n"
    (found,) = missing(with_service(make_row, service, top), {})
    assert reason in found


@pytest.mark.parametrize(
    ("service", "problem"),
    [
        ("{image: a, depends_on: [gone]}", "services.db.depends_on: no service 'gone'"),
        ("{image: a, depends_on: {main: {condition: soon}}}", "services.db.depends_on: not a condition"),
        ("{image: a, depends_on: [b]}\n  b: {image: a, depends_on: [db]}", "depends_on: a cycle: b, db"),
        ("{image: a, healthcheck: {test: [a]}}", "services.db.healthcheck.test: needs"),
        ("{image: a, healthcheck: {test: a, timeout: soon}}", "services.db.healthcheck.timeout: not a dur"),
        ("{image: a, healthcheck: {test: a, retries: x}}", "services.db.healthcheck.retries: not a number"),
        ("{image: a, restart: maybe}", "services.db.restart: not a policy"),
        ("{image: a, command: 'a \"'}", "services.db.command: No closing quotation"),
        ("{image: a}\n  'a b': {image: a}", "services: more than 32, or a name that is no host name"),
    ],
)
def test_malformed_settings_of_other_services(make_row: MakeRow, service: str, problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"{PATH}: {problem}")):
        with_service(make_row, service)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('[agent]\nuser = "app"\n', "user: commands run as root here, not as 'app'"),
        ("[verifier]\nuser = 1000\n", "user: commands run as root here, not as 1000"),
        ('[agent]\nnetwork_mode = "public"\n', "network_mode differs from that of the Compose file"),
    ],
)
def test_settings_of_the_phases_that_cannot_be_applied(make_row: MakeRow, config: str, reason: str) -> None:
    assert missing(composed(make_row, "{network_mode: none}", config), {}) == (f"task.toml: {reason}",)


def test_other_services_and_files(make_row: MakeRow) -> None:
    text = "services: {main: {build: .}, tool: {image: a, profiles: [debug]}}\n"
    assert missing(task_of(make_row({PATH: text})), {}) == ()
    assert "include" in missing(task_of(make_row({PATH: "include: [a]\nservices: {}\n"})), {})[0]
    separate = '[verifier]\nenvironment_mode = "separate"\n'
    files = {
        "tests/Dockerfile": "FROM base\n",
        "tests/docker-compose.yaml": "services: {main: {user: app}}\n",
    }
    assert "services.main.user" in missing(task_of(make_row(files, config=separate)), {})[0]
    same = row(**{"task.yaml": "instruction: x\nrun_tests_in_same_shell: true\n"})
    assert "run_tests_in_same_shell" in missing(task_of(same), {})[0]


@pytest.mark.anyio
async def test_an_episode_has_the_settings_of_its_service(node: Node, make_row: MakeRow) -> None:
    given = make_row(
        {
            "environment/Dev": (
                "FROM base AS one\nARG LEVEL=low\nENV BUILT=$LEVEL\nWORKDIR /app\nFROM one\nENV BUILT=no\n"
            ),
            "environment/vars.env": "FROM_FILE=yes\n",
            PATH: (
                "services:\n  main:\n    build: {dockerfile: Dev, args: {LEVEL: high}, target: one}\n"
                "    environment: {MODE: strict}\n    env_file: vars.env\n"
                "    hostname: box\n    working_dir: /srv\n"
            ),
            # Without a first line, bash runs the scripts.
            "tests/test.sh": (
                "words=($MODE $BUILT $FROM_FILE $(cat /srv/out.txt))\n"
                'if [[ "${words[*]}" == "strict high yes box" ]]; then echo 1; else echo 0; fi '
                "> /logs/verifier/reward.txt\n"
            ),
            "solution/solve.sh": "text=($(cat /etc/hostname)); echo ${text[0]} > /srv/out.txt\n",
        }
    )
    assert (await graded(node, given)).reward == 0
    async with episode(node, given) as one:
        assert (await one.bash("pwd; echo $MODE $BUILT $FROM_FILE")).text == "/srv\nstrict high yes\n"
        await one.solve()
        assert (await one.env.eval()).reward == 1
