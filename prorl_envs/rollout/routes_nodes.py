"""The routes of the nodes."""

from typing import Annotated

from fastapi import FastAPI, Path

from prorl_envs.rollout.errors import NotFound
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.service import RolloutService
from prorl_envs.rollout.views import NodeList

type _Name = Annotated[str, Path(max_length=200)]


def add_nodes(app: FastAPI, service: RolloutService) -> None:
    """Look at the machines of a service, and take them out of use and back."""

    def fleet() -> Fleet:
        if service.fleet is None:
            raise NotFound("this service has no nodes", hint="set nodes.port, nodes.processes or nodes.ray")
        return service.fleet

    def listed() -> NodeList:
        return NodeList(nodes=service.fleet.views() if service.fleet is not None else [])

    @app.get("/v1/nodes")
    async def get_nodes() -> NodeList:
        """The machines that carry jobs out beside the service's own, and those that were lost."""
        return listed()

    @app.post("/v1/nodes/{name}/drain")
    async def drain_node(name: _Name) -> NodeList:
        """Give a node no further jobs; it finishes what it has, and stays until it is ended or resumed."""
        fleet().drain(name)
        return listed()

    @app.post("/v1/nodes/{name}/resume")
    async def resume_node(name: _Name) -> NodeList:
        """Give a node jobs again."""
        fleet().undrain(name)
        return listed()
