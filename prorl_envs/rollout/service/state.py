"""State of the service, and the checks whether it accepts a request."""

import asyncio
from enum import StrEnum

from prorl_envs.rollout.api.errors import Unavailable


class ServiceState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class StateGuard:
    """Admits requests according to the state of the service.

    Attributes:
        state: the current state.
        stopping: True once a stop was requested. A stop cannot be revoked.
        lock: held while a submission is accepted and while the state changes, so that a change of state never
            happens in the middle of a submission.
    """

    def __init__(self) -> None:
        self.state = ServiceState.STARTING
        self.stopping = False
        self.lock = asyncio.Lock()

    def check_started(self) -> None:
        """Check that the service has read the store. Before that it does not know the stored groups.

        Raises:
            Unavailable: the service is still starting.
        """
        if self.state is ServiceState.STARTING:
            raise Unavailable(f"the service is {self.state}", hint="ask again soon", retry_after_s=1.0)

    def check_open(self) -> None:
        """Check that the service accepts new work.

        Raises:
            Unavailable: the service is starting, draining or stopped.
        """
        self.check_started()
        if self.state is not ServiceState.SERVING:
            raise Unavailable(f"the service is {self.state}", hint="submit to another service, or later")

    def check_operable(self) -> None:
        """Check that the service has started and is not stopping.

        Raises:
            Unavailable: the service is starting or stopping.
        """
        self.check_started()
        if self.stopping:
            raise Unavailable(f"the service is {self.state}")
