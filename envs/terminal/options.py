"""Options of this family: `environments.NAME.options` in the settings."""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TerminalOptions(BaseModel):
    """All of the family's options.

    Args:
        public_network: what tasks with a public network can reach: a list of hosts, as in `Network.allow`, or
            `open` for the host's own network, including its loopback. Nothing by default.
        variables: values for the variables that tasks take from the person who runs them. The environment of
            this process is never used, since a task may come from anybody.
        timeout_factor: factor of the timeouts that tasks set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    public_network: tuple[str, ...] | Literal["open"] = ()
    variables: Mapping[str, str] = Field(default_factory=dict)
    timeout_factor: float = Field(default=1.0, gt=0)
