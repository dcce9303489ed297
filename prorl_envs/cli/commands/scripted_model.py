"""`prorl-envs scripted-model`: scripted model server in the foreground, to test a service without a model."""

import asyncio
from pathlib import Path

from fastapi import FastAPI

from prorl_envs.catalog import Catalog
from prorl_envs.cli.commands.demo import Chosen, script, scripted_tokenizer
from prorl_envs.cli.output.console import err, out
from prorl_envs.config import Settings
from prorl_envs.errors import InputError
from prorl_envs.stop_signals import on_stop
from prorl_envs.testing.openai_face import add_conversations
from prorl_envs.testing.scripted import Behaviour, Mix
from prorl_envs.testing.scripted_app import ScriptedService, add_vllm
from prorl_envs.testing.server import ScriptedServer


def read_solved(catalog: Catalog, environment: str, data: Path | None) -> list[Chosen]:
    """Read the tasks of a data file that have reference solutions.

    Raises:
        InputError: no such environment, a row is wrong, or no row has a reference.
    """
    tasks = catalog.rows(environment, data)
    chosen = [Chosen(environment, row, task) for row, task in tasks if task.reference]
    if not chosen:
        where = catalog.data(environment, data)
        raise InputError(f"{where}: no task has a reference", hint="add `reference` to the rows")
    return chosen


async def serve_script(
    settings: Settings, environment: str, data: Path | None, *, port: int, mix: Mix, seed: int
) -> None:
    """Serve until a signal to stop, then print the request counts.

    Args:
        settings: all settings.
        environment: name of the environment.
        data: data file with the tasks; None means the environment's examples.
        port: TCP port on loopback; 0 means a free port.
        mix: proportions of the behaviours that are dealt to the episodes of each task.
        seed: seed of the order of behaviours and of the log-probabilities.

    Raises:
        InputError: no task of the data has a reference, or the port is taken.
    """
    chosen, folder = read_solved(Catalog.of(settings), environment, data), scripted_tokenizer(settings)

    def interface(app: FastAPI, service: ScriptedService) -> None:
        add_vllm(app, service)
        add_conversations(app, [one.task for one in chosen])

    stopped = asyncio.Event()
    scripted = ScriptedServer(
        script(chosen), interface=interface, port=port, mix=mix, seed=seed, unknown=Behaviour.SOLVE
    )
    with on_stop(lambda _: stopped.set()):
        async with scripted as server:
            err.print(f"plays the reference solutions of {len(chosen)} {environment} tasks, without a model")
            err.print(
                f"NeMo Gym uses it with --model reference --model-url {server.url}/v1 --model-api-key none"
            )
            err.print("Ctrl-C stops it. Use it like a model server, with these options of `run` or `serve`:")
            out.print(f"--llm {server.url}/v1 --tokenizer {folder}", soft_wrap=True)
            out.file.flush()  # a reader of a pipe waits for this line
            await stopped.wait()
    err.print(f"{server.counts.requests} requests of {server.counts.sessions} sessions")
