"""Agentic RL environments for NeMo Gym on fast rootless sandboxes, served as rollouts.

The names below are the public API. Each is imported on first use, so that importing this package imports
neither NeMo Gym, Ray nor torch, and the client loads no service. Integrations have modules of their own:
`prorl_envs.gym`, `prorl_envs.trainers`, `prorl_envs.nemo.server` and `prorl_envs.nemo.fixture`.
"""

TYPE_CHECKING = False  # type checkers treat it as true; importing `typing` would slow down each fork
if TYPE_CHECKING:
    from prorl_envs.env.answers import is_close, parse_number
    from prorl_envs.env.base import Environment, Grade, Prompt, ReferenceCall, Task
    from prorl_envs.env.node import Node
    from prorl_envs.env.registry import example_path, family, load_tasks
    from prorl_envs.env.sandboxed import SandboxedEnvironment, sandbox_session
    from prorl_envs.env.scoring import CheckResult, Scoring, score
    from prorl_envs.env.validate import play, validate
    from prorl_envs.errors import (
        FailureKind,
        InputError,
        ModelError,
        ProrlError,
        SandboxError,
        SandboxLimit,
        ToolError,
        UnsupportedMachine,
    )
    from prorl_envs.images.builder import ImageBuilder
    from prorl_envs.images.modes import ImageMode
    from prorl_envs.images.store import ImageStore
    from prorl_envs.images.template import ImageTemplate
    from prorl_envs.loggers.base import LoggedRun, RunLogger
    from prorl_envs.model.types import Sampling
    from prorl_envs.rollout.api.batches import BatchRequest, BatchTask
    from prorl_envs.rollout.api.interactive import CallRequest, CallStep, EpisodeRequest
    from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, Result, Selection, Trajectory
    from prorl_envs.rollout.client.client import RolloutClient
    from prorl_envs.rollout.client.result_files import read_results
    from prorl_envs.rollout.client.result_router import ResultRouter
    from prorl_envs.rollout.client.sync import SyncRolloutClient
    from prorl_envs.runs.statistics import RunSummary
    from prorl_envs.sandbox.base import Mount, Network, Sandbox, SandboxLimits, SandboxSpec
    from prorl_envs.sandbox.filesystem.python_runtime import python_spec
    from prorl_envs.tools.client.python import PythonEngine
    from prorl_envs.tools.client.toolbox import Toolbox
    from prorl_envs.tools.pool.sandbox_session import SandboxSession
    from prorl_envs.tools.schemas import BASH, EDITOR, FINISH, PYTHON
    from prorl_envs.tools.types import ToolCall, ToolResult

__version__ = "0.1.0"

#: Module of each public name.
MODULES = {
    "AgentLimits": "prorl_envs.rollout.api.types",
    "BASH": "prorl_envs.tools.schemas",
    "BatchRequest": "prorl_envs.rollout.api.batches",
    "BatchTask": "prorl_envs.rollout.api.batches",
    "CallRequest": "prorl_envs.rollout.api.interactive",
    "CallStep": "prorl_envs.rollout.api.interactive",
    "CheckResult": "prorl_envs.env.scoring",
    "EDITOR": "prorl_envs.tools.schemas",
    "Environment": "prorl_envs.env.base",
    "EpisodeRequest": "prorl_envs.rollout.api.interactive",
    "FINISH": "prorl_envs.tools.schemas",
    "FailureKind": "prorl_envs.errors",
    "Grade": "prorl_envs.env.base",
    "GroupRequest": "prorl_envs.rollout.api.types",
    "ImageBuilder": "prorl_envs.images.builder",
    "ImageMode": "prorl_envs.images.modes",
    "ImageStore": "prorl_envs.images.store",
    "ImageTemplate": "prorl_envs.images.template",
    "InputError": "prorl_envs.errors",
    "LoggedRun": "prorl_envs.loggers.base",
    "ModelError": "prorl_envs.errors",
    "Mount": "prorl_envs.sandbox.base",
    "Network": "prorl_envs.sandbox.base",
    "Node": "prorl_envs.env.node",
    "PYTHON": "prorl_envs.tools.schemas",
    "Prompt": "prorl_envs.env.base",
    "ProrlError": "prorl_envs.errors",
    "PythonEngine": "prorl_envs.tools.client.python",
    "ReferenceCall": "prorl_envs.env.base",
    "Result": "prorl_envs.rollout.api.types",
    "ResultRouter": "prorl_envs.rollout.client.result_router",
    "RolloutClient": "prorl_envs.rollout.client.client",
    "RunLogger": "prorl_envs.loggers.base",
    "RunSummary": "prorl_envs.runs.statistics",
    "Sampling": "prorl_envs.model.types",
    "Sandbox": "prorl_envs.sandbox.base",
    "SandboxError": "prorl_envs.errors",
    "SandboxLimit": "prorl_envs.errors",
    "SandboxLimits": "prorl_envs.sandbox.base",
    "SandboxSession": "prorl_envs.tools.pool.sandbox_session",
    "SandboxSpec": "prorl_envs.sandbox.base",
    "SandboxedEnvironment": "prorl_envs.env.sandboxed",
    "Scoring": "prorl_envs.env.scoring",
    "Selection": "prorl_envs.rollout.api.types",
    "SyncRolloutClient": "prorl_envs.rollout.client.sync",
    "Task": "prorl_envs.env.base",
    "ToolCall": "prorl_envs.tools.types",
    "ToolError": "prorl_envs.errors",
    "ToolResult": "prorl_envs.tools.types",
    "Toolbox": "prorl_envs.tools.client.toolbox",
    "Trajectory": "prorl_envs.rollout.api.types",
    "UnsupportedMachine": "prorl_envs.errors",
    "example_path": "prorl_envs.env.registry",
    "family": "prorl_envs.env.registry",
    "is_close": "prorl_envs.env.answers",
    "load_tasks": "prorl_envs.env.registry",
    "parse_number": "prorl_envs.env.answers",
    "play": "prorl_envs.env.validate",
    "python_spec": "prorl_envs.sandbox.filesystem.python_runtime",
    "read_results": "prorl_envs.rollout.client.result_files",
    "sandbox_session": "prorl_envs.env.sandboxed",
    "score": "prorl_envs.env.scoring",
    "validate": "prorl_envs.env.validate",
}

__all__ = [
    "BASH",
    "EDITOR",
    "FINISH",
    "PYTHON",
    "AgentLimits",
    "BatchRequest",
    "BatchTask",
    "CallRequest",
    "CallStep",
    "CheckResult",
    "Environment",
    "EpisodeRequest",
    "FailureKind",
    "Grade",
    "GroupRequest",
    "ImageBuilder",
    "ImageMode",
    "ImageStore",
    "ImageTemplate",
    "InputError",
    "LoggedRun",
    "ModelError",
    "Mount",
    "Network",
    "Node",
    "Prompt",
    "ProrlError",
    "PythonEngine",
    "ReferenceCall",
    "Result",
    "ResultRouter",
    "RolloutClient",
    "RunLogger",
    "RunSummary",
    "Sampling",
    "Sandbox",
    "SandboxError",
    "SandboxLimit",
    "SandboxLimits",
    "SandboxSession",
    "SandboxSpec",
    "SandboxedEnvironment",
    "Scoring",
    "Selection",
    "SyncRolloutClient",
    "Task",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "Toolbox",
    "Trajectory",
    "UnsupportedMachine",
    "example_path",
    "family",
    "is_close",
    "load_tasks",
    "parse_number",
    "play",
    "python_spec",
    "read_results",
    "sandbox_session",
    "score",
    "validate",
]


def __getattr__(name: str) -> object:
    """Import a public name.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
