"""`prorl-envs serve`: the rollout service in the foreground, until a signal."""

from prorl_envs.cli.compose import Model, rollout_service
from prorl_envs.cli.console import err
from prorl_envs.cli.logs import exporting_traces, set_up_logging
from prorl_envs.cli.running import settled
from prorl_envs.config import Settings
from prorl_envs.rollout.server import serve_until_signal


async def serve(settings: Settings, model: Model) -> None:
    """Serve until SIGINT or SIGTERM, then drain. A second signal hurries.

    Raises:
        InputError: the address cannot be bound, or needs a token; or the store cannot be opened.
    """

    def ready(url: str) -> None:
        err.print(f"rollout service: {url}   (documentation: {url}/openapi.json)")
        err.print(f"dashboard:       {url}/dashboard")
        for server in model.servers:
            err.print(f"model server:    {server}")
        if not model.servers:
            err.print("model server:    none yet; turns wait for the first (POST /v1/model_servers)")
        unfinished = service.status().unfinished
        going_on = f"   ({unfinished} unfinished jobs go on)" if unfinished else ""
        err.print(f"store:           {settings.service.store or 'memory; a restart forgets'}{going_on}")
        if fleet is not None:
            err.print(f"nodes join at:   port {fleet.port} of {settings.nodes.host}")
        err.print("Ctrl-C ends it")

    set_up_logging(settings.log)
    with exporting_traces():
        async with rollout_service(settings, model, durable=True) as service:
            fleet = service.fleet
            settled()
            await serve_until_signal(service, settings.server, ready=ready)
