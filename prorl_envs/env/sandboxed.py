"""What every family that works in one sandbox shares. A subclass holds only what is particular: its task
model, how the workspace is prepared, which tools are on offer, and how the episode is graded."""

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from prorl_envs.env.base import Environment, Grade, Prompt, Task
from prorl_envs.env.node import Node
from prorl_envs.env.rows import validate_row
from prorl_envs.errors import EnvironmentFault
from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.tools.client import Toolbox
from prorl_envs.tools.types import ToolCall, ToolResult, ToolSpec


class Phase(StrEnum):
    """Where an episode is."""

    NEW = "new"
    READY = "ready"
    GRADED = "graded"
    CLOSED = "closed"
