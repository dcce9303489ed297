"""Options of this family: `environments.NAME.options` in the settings."""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TerminalOptions(BaseModel):
    """All options of the family.

    Args:
        public_network: hosts that tasks with a public network can reach: a list as in `Network.allow`, or
            `open` for the host's own network, including its loopback. By default, none.
        variables: values of the variables that tasks expect from the user. The environment of this process is
            never used, because tasks are untrusted.
        timeout_factor: factor of the timeouts of tasks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    public_network: tuple[str, ...] | Literal["open"] = ()
    variables: Mapping[str, str] = Field(default_factory=dict)
    timeout_factor: float = Field(default=1.0, gt=0)
