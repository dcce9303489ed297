"""Server with a scripted model behind both of OpenAI's interfaces."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastapi import FastAPI

from prorl_envs.env.base import Task
from prorl_envs.testing.openai_face import add_conversations
from prorl_envs.tools.types import JsonObject
from tests.support.serving import served


@contextmanager
def scripted_openai(tasks: Sequence[Task]) -> Iterator[str]:
    """Serve the application on the loopback interface while the block runs; yield the URL with `/v1`."""
    with served(face(tasks)) as url:
        yield f"{url}/v1"


def face(tasks: Sequence[Task]) -> FastAPI:
    """Create the application: `POST /v1/responses`, `POST /v1/chat/completions`, `GET /v1/models`."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> JsonObject:
        return {"object": "list", "data": [{"id": "reference", "object": "model"}]}

    add_conversations(app, tasks)
    return app
