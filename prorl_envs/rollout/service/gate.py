"""State of the service: what it accepts now."""

import asyncio
from enum import StrEnum

from prorl_envs.rollout.api.errors import Unavailable


class ServiceState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class ServiceGate:
    """Admits requests according to the state of the service.

    Attributes:
        state: the current state.
        stopping: whether a stop was requested, which cannot be taken back.
        lock: held while submissions are accepted and while the state changes, so that a group is accepted
            either before or after a change.
    """

    def __init__(self) -> None:
        self.state = ServiceState.STARTING
        self.stopping = False
        self.lock = asyncio.Lock()

    def check_started(self) -> None:
        """Check that the service has read the store; before that, accepted groups are not known.

        Raises:
            Unavailable: it has not.
        """
        if self.state is ServiceState.STARTING:
            raise Unavailable(f"the service is {self.state}", hint="ask again soon", retry_after_s=1.0)

    def check_open(self) -> None:
        """Check that the service accepts new work.

        Raises:
            Unavailable: it does not.
        """
        self.check_started()
        if self.state is not ServiceState.SERVING:
            raise Unavailable(f"the service is {self.state}", hint="submit to another, or later")

    def check_operable(self) -> None:
        """Check that the service has started and is not stopping.

        Raises:
            Unavailable: it has not, or it is.
        """
        self.check_started()
        if self.stopping:
            raise Unavailable(f"the service is {self.state}")
