"""`prorl-envs run`: episodes of one family, on a service started for them or on one that runs already."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from prorl_envs.catalog import Catalog
from prorl_envs.cli.compose import connect, rollout_service
from prorl_envs.cli.rollouts import carry_out
from prorl_envs.config import Settings
from prorl_envs.errors import InputError
from prorl_envs.policy.types import Sampling
from prorl_envs.rollout.client import RolloutClient
from prorl_envs.rollout.server import serving
from prorl_envs.rollout.types import AgentLimits, GroupRequest


def requests(
    catalog: Catalog,
    environment: str,
    data: Path | None,
    *,
    limit: int | None,
    samples: int,
    sampling: Sampling,
    limits: AgentLimits,
) -> list[GroupRequest]:
    """One group for each task of a data file. Group ids carry the time, so a second run is a second run.

    Raises:
        InputError: no such environment, a row is wrong, or there is none.
    """
    run = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    pairs = catalog.rows(environment, data)
    if not pairs:
        raise InputError(f"{catalog.data(environment, data)} holds no task")
    return [
        GroupRequest(
            id=f"{run}/{environment}/{task.id}",
            environment=environment,
            task=row,
            samples=samples,
            sampling=sampling,
            limits=limits,
        )
        for row, task in pairs[:limit]
    ]


async def on_service(url: str, token: str | None, groups: Sequence[GroupRequest], folder: Path) -> None:
    """Run groups on a service that is already there. What is unfinished when this ends is cancelled."""
    async with RolloutClient(url, token=token) as client:
        try:
            await carry_out(client, groups, folder, every_sample=True)
        except BaseException:
            for group in groups:
                await client.cancel_group(group.id)
            raise


async def here(
    settings: Settings,
    llm: Sequence[str],
    tokenizer: str | None,
    name: str | None,
    api_key: str | None,
    groups: Sequence[GroupRequest],
    folder: Path,
) -> None:
    """Run groups on a service started for them alone."""
    model = await connect(
        llm,
        tokenizer=tokenizer,
        name=name,
        api_key=api_key,
        protocol=settings.model.protocol,
        tool_format=settings.model.tool_format,
    )
    async with (
        rollout_service(settings, model) as service,
        serving(service) as url,
        RolloutClient(url) as client,
    ):
        await carry_out(client, groups, folder, every_sample=True)
