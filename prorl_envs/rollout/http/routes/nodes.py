"""Routes of the nodes."""

from typing import Annotated

from fastapi import FastAPI, Path

from prorl_envs.rollout.api.errors import NotFound
from prorl_envs.rollout.api.views import NodeList
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.service.service import RolloutService

type _Name = Annotated[str, Path(max_length=200)]


def add_nodes(app: FastAPI, service: RolloutService) -> None:
    """Add the routes that list, drain and resume nodes."""

    def fleet() -> Fleet:
        if service.fleet is None:
            raise NotFound("this service has no nodes", hint="set nodes.ray")
        return service.fleet

    def listed() -> NodeList:
        return NodeList(nodes=service.fleet.views() if service.fleet is not None else [])

    @app.get("/v1/nodes")
    async def get_nodes() -> NodeList:
        """Return the nodes that run jobs beside the service's own machine, including lost nodes."""
        return listed()

    @app.post("/v1/nodes/{name}/drain")
    async def drain_node(name: _Name) -> NodeList:
        """Stop sending jobs to a node. It finishes its jobs, and stays connected until it is stopped."""
        fleet().drain(name)
        return listed()

    @app.post("/v1/nodes/{name}/resume")
    async def resume_node(name: _Name) -> NodeList:
        """Resume sending jobs to a node."""
        fleet().undrain(name)
        return listed()
