"""Services of a task: their networks, their order, failures of their start, their isolation and their end."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.envs.terminal.env import TerminalEnvironment
from prorl_envs.envs.terminal.services import health_check
from prorl_envs.errors import EnvironmentFault
from prorl_envs.sandbox.filesystem.layered import ImageConfig

from .conftest import MakeRow
from .test_env import episode

pytestmark = pytest.mark.anyio
COMPOSE = "environment/docker-compose.yaml"
#: HTTP server on $PORT that answers with $WORD, or with its count of words for the path /count.
SERVER = """\
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
count = 0
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global count
        count += self.path == "/word"
        self.send_response(200)
        self.end_headers()
        answer = str(count) if self.path == "/count" else os.environ.get("WORD", "hello")
        self.wfile.write(answer.encode())
print("ready", flush=True)
ThreadingHTTPServer(("0.0.0.0", int(os.environ.get("PORT", "8080"))), Handler).serve_forever()
"""
CHECK = "import urllib.request as r; r.urlopen('http://localhost:8080/health')"
#: Function of bash that prints the body of an HTTP answer.
GET = (
    "get() { exec 3<>/dev/tcp/$1/$2 && printf 'GET %s HTTP/1.0\\r\\n\\r\\n' $3 >&3 && "
    '{ while read -r line <&3; do :; done; echo "$line"; }; }; '
)
FILES = {
    "environment/api/Dockerfile": (
        "FROM python\nENV SECRET=s3cret\nWORKDIR /srv\nCOPY server.py data.txt /srv/\nEXPOSE 8080\n"
        f'HEALTHCHECK --interval=1s --retries=30 CMD ["python3", "-c", "{CHECK}"]\n'
        'ENTRYPOINT ["python3"]\nCMD ["/srv/server.py"]\n'
    ),
    "environment/api/Broken": "FROM python\nRUN exit 4\n",
    "environment/api/server.py": SERVER,
    "environment/api/data.txt": "only in the service\n",
    "environment/seed.txt": "from the task\n",
}
#: The grader asks the service that the agent has used.
TEST = (
    f"{GET}\n"
    'if [ "$(cat /app/out.txt)" = hello ] && [ "$(get api 8080 /count)" = 1 ]; then echo 1; else echo 0; fi'
    " > /logs/verifier/reward.txt\n"
)


def with_services(
    make_row: MakeRow, services: str, files: Mapping[str, Any] | None = None, *, main: str = "{build: .}"
) -> dict[str, Any]:
    text = f"services:\n  main: {main}\n{services}"
    return make_row({**FILES, COMPOSE: text, **(files or {})})


async def text_of(one: Any, command: str) -> str:
    return str((await one.bash(GET + command)).text).strip()


async def test_the_agent_and_the_tests_reach_the_same_service(node: Node, make_row: MakeRow) -> None:
    row = with_services(
        make_row,
        "  api:\n    build: ./api\n    ports: ['80:8080']\n",
        {"tests/test.sh": TEST, "solution/solve.sh": f"{GET}get api 8080 /word > /app/out.txt\n"},
    )
    (verdict,) = await validate(TerminalEnvironment, node, [TerminalEnvironment.load(row)])
    assert verdict.reference == (1, 1) and verdict.untouched == 0
    assert not node.driver.sandboxes


async def test_services_start_in_their_order_with_their_settings(node: Node, make_row: MakeRow) -> None:
    services = """\
  web:
    image: shared
    entrypoint: [bash, -c]
    command: ['read -r word < /srv/seen; WORD="$$word $$MODE" PORT=80 python3 server.py']
    depends_on: {job: {condition: service_completed_successfully}, api: {condition: service_healthy}}
    environment: {MODE: strict}
    working_dir: /srv
    volumes: ['./seed.txt:/srv/seen:ro', 'state:/var/state']
    healthcheck: {test: "python3 -c 'import socket; socket.create_connection((\\"web\\", 80))'", retries: 50}
  job:
    image: shared
    entrypoint: bash
    command: ['-c', 'exec 3<>/dev/tcp/api/8080; printf "GET /word HTTP/1.0\\r\\n\\r\\n" >&3; read -r x <&3']
    depends_on: {api: {condition: service_healthy}, main: {condition: service_started}}
  api:
    build: ./api
    image: shared
    container_name: first
    networks: {default: {aliases: [alias]}}
    restart: on-failure
    entrypoint: bash
    command: [-c, 'if [ -e again ]; then exec python3 server.py; fi; touch again; exit 1']
volumes: {state: {}}
"""
    async with episode(node, with_services(make_row, services)) as one:
        assert await text_of(one, "get web 80 /") == "from the task strict"
        for name in ("api", "alias", "first"):
            assert await text_of(one, f"get {name} 8080 /count") == "1"  # the job has asked before
        # The agent has ports of its own, and a service listens on a port that another one has.
        assert "refused" in await text_of(one, "get localhost 8080 /")


async def test_the_agent_starts_after_the_services_that_it_depends_on(node: Node, make_row: MakeRow) -> None:
    services = """\
  api: {build: ./api}
  job:
    build: ./api
    command: [-c, "import time, urllib.request as r; time.sleep(1); r.urlopen('http://api:8080/word')"]
    depends_on: {api: {condition: service_healthy}}
"""
    main = "{depends_on: {job: {condition: service_completed_successfully}}}"
    async with episode(node, with_services(make_row, services, main=main)) as one:
        assert await text_of(one, "get api 8080 /count") == "1"


async def test_a_service_is_reached_only_through_its_networks(node: Node, make_row: MakeRow) -> None:
    services = """\
  api: {build: ./api, networks: [default, back]}
  db: {build: ./api, networks: [back], environment: {WORD: stored}, healthcheck: {disable: true}}
  alone: {build: ./api, network_mode: none}
networks: {back: {internal: true}}
"""
    async with episode(node, with_services(make_row, services)) as one:
        assert await text_of(one, "get api 8080 /word") == "hello"
        assert "name resolution" in await text_of(one, "get db 8080 /")
        hosts = one.env._connected().hosts("api")
        assert sorted(hosts) == ["api", "db", "main"]
        assert "unreachable" in await text_of(one, f"get {hosts['db']} 8080 /")
        # Neither files, nor processes, nor variables of a service are visible.
        found = await text_of(
            one, "ls /srv; grep -rls 'only in the service' / --exclude-dir=proc; cat /proc/[0-9]*/environ"
        )
        assert "data.txt" not in found and "s3cret" not in found
        api = one.env._connected().session("api")
        assert not api.sandbox.spec.network.open and api.sandbox.spec.network.allow == ()
        sandboxes = len(node.driver.sandboxes)
    assert sandboxes == 4 and not node.driver.sandboxes


@pytest.mark.parametrize(
    ("service", "problem"),
    [
        ("{build: ./api, command: ['-c', 'print(\"no disk\"); exit(3)']}",
         "the service api ended with exit status 3; its output ends with: no disk"),
        ("{build: ./api, healthcheck: {test: echo bad; exit 1, interval: 1s, retries: 2}}",
         "the service api is not healthy: .*failed 2 times: bad\n; its output ends with: ready"),
        ("{build: ./api, healthcheck: {test: [CMD, no-such-program]}}", "health check cannot run"),
        ("{build: ./api, entrypoint: no-such-program}", "the service api cannot start: No such file"),
        ("{build: ./api, entrypoint: [], command: []}", "the service api has no command"),
        ("{build: ./api, command: ['-c', '']}", "the service api ended before it was healthy"),
        ("{build: ./api}\n  b: {image: base, command: sleep 100, healthcheck: {disable: true}}\n"
         "  c: {image: base, command: sleep 9, depends_on: {b: {condition: service_healthy}}}",
         "the service b has no health check"),
        ("{build: ./api}\n  b: {image: base, command: bash -c 'exit 2'}\n"
         "  c: {image: base, command: sleep 9, depends_on: {b: {condition: service_completed_successfully}}}",
         "the service b ended with exit status 2"),
        ("{build: ./api, volumes: ['./seed.txt:/srv/data.txt/x']}", "service api cannot have its volumes: "),
        ("{build: ./api, volumes: ['/srv/data.txt/x']}", "cannot have its volumes; .*Not a directory"),
        ("{build: {context: ./api, dockerfile: Broken}}", "the service api: the image cannot be built"),
    ],
)  # fmt: skip
async def test_a_failed_start_names_the_service(
    node: Node, make_row: MakeRow, service: str, problem: str
) -> None:
    with pytest.raises(EnvironmentFault, match=f"(?s){problem}"):
        async with episode(node, with_services(make_row, f"  api: {service}\n")):
            pass
    assert not node.driver.sandboxes


async def test_services_continue_in_the_next_step(node: Node, make_row: MakeRow) -> None:
    config = 'multi_step_reward_strategy = "final"\n[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'
    files = {f"steps/{name}/instruction.md": name for name in "ab"}
    files["tests/test.sh"] = f"{GET}\nget api 8080 /count > /logs/verifier/reward.txt\n"
    row = with_services(make_row, "  api: {build: ./api}\n", files)
    row["directory"]["task.toml"] += config
    async with episode(node, row) as one:
        assert await text_of(one, "get api 8080 /word") == "hello"
        await one.next_step()
        assert await text_of(one, "get api 8080 /count") == "1"
        assert (await one.env.eval()).reward == 1


async def test_a_separate_verifier_gets_files_of_a_service(node: Node, make_row: MakeRow) -> None:
    command = "import urllib.request as r; print(r.urlopen('http://api:8080/count').read().decode())"
    config = (
        'artifacts = [{source = "/out/count", service = "api"}]\n'
        '[verifier]\nenvironment_mode = "separate"\n[[verifier.collect]]\nservice = "api"\n'
        f'command = "mkdir /out; python3 -c \\"{command}\\" > /out/count"\n'
    )
    files = {
        "tests/Dockerfile": "FROM base\nCOPY test.sh /tests/\nRUN chmod +x /tests/test.sh\n",
        "tests/test.sh": "cat /out/count > /logs/verifier/reward.txt; ! : < /dev/tcp/api/8080\n",
    }
    service = "  api: {build: ./api, volumes: ['./seed.txt:/new/folder/seed.txt']}\n"
    row = with_services(make_row, service, files)
    row["directory"]["task.toml"] += config
    async with episode(node, row) as one:
        api = one.env._connected().session("api")
        assert await api.tools.read("/new/folder/seed.txt") == b"from the task\n"
        await text_of(one, "get api 8080 /word")
        assert (await one.env.eval()).reward == 1


@pytest.mark.parametrize(
    ("own", "image", "expected"),
    [
        ({}, None, None),
        ({}, {"Test": ["NONE"]}, None),
        ({}, {"Test": ["CMD", "a", "b"]}, (("a", "b"), 30, 30, 0, 5, 3)),
        ({}, {"Test": ["CMD-SHELL", "a b"], "Interval": 10**9, "Retries": 7, "StartPeriod": 2 * 10**9},
         (("/bin/sh", "-c", "a b"), 1, 30, 2, 5, 7)),
        ({"test": ("NONE",)}, {"Test": ["CMD", "a"]}, None),
        ({"interval_s": 2.0, "retries": 1}, {"Test": ["CMD", "a"], "Interval": 10**9, "Timeout": 10**9},
         (("a",), 2, 1, 0, 5, 1)),
        ({"test": ("CMD", "b")}, {"Test": "a", "Interval": "x", "Retries": -1, "Timeout": 10**30},
         (("b",), 30, 30, 0, 5, 3)),
    ],
)  # fmt: skip
def test_health_checks_of_a_service_and_its_image(
    own: dict[str, Any], image: dict[str, Any] | None, expected: tuple[Any, ...] | None
) -> None:
    check = health_check(own, ImageConfig(healthcheck=image))
    found = check and (
        check.argv,
        *(check.interval_s, check.timeout_s, check.start_period_s, check.start_interval_s, check.retries),
    )
    assert found == expected


async def test_an_open_network_excludes_services(node: Node, make_row: MakeRow) -> None:
    with pytest.raises(EnvironmentFault, match="public_network is open"):
        async with episode(
            node, with_services(make_row, "  api: {build: ./api}\n"), {"public_network": "open"}
        ):
            pass


async def test_a_cancelled_start_leaves_nothing(node: Node, make_row: MakeRow) -> None:
    check = "healthcheck: {test: [CMD, bash, -c, 'exit 1'], retries: 1000}"
    env = TerminalEnvironment(node)
    task = env.load(with_services(make_row, f"  api: {{build: ./api, {check}}}\n"))
    starting = asyncio.create_task(env.init(task))
    while len(node.driver.sandboxes) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await env.close()
    assert not node.driver.sandboxes
