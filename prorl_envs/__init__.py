"""Agentic RL environments for NeMo Gym on fast rootless sandboxes, served as rollouts.

The names below are the public API. Each is imported on first use, so that importing this package imports
neither NeMo Gym, Ray nor torch, and the client loads no service. Integrations have modules of their own:
`prorl_envs.gym`, `prorl_envs.trainers`, `prorl_envs.nemo.server` and `prorl_envs.nemo.fixture`.
"""

TYPE_CHECKING = False  # type checkers treat it as true; importing `typing` would slow down each fork
if TYPE_CHECKING:
    from prorl_envs.env.answers import is_close, parse_number
    from prorl_envs.env.audit.audit import audit, validate
    from prorl_envs.env.audit.episodes import play
    from prorl_envs.env.base import Environment, Grade, Prompt, ReferenceCall, Task
    from prorl_envs.env.node import Node
    from prorl_envs.env.registry import example_path, family, load_tasks
    from prorl_envs.env.sandboxed import SandboxedEnvironment, sandbox_session
    from prorl_envs.env.scoring import CheckResult, Scoring, score
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
    from prorl_envs.rollout.api.types import (
        AgentLimits,
        BranchRequest,
        GroupRequest,
        Result,
        Selection,
        Trajectory,
    )
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
    name: f"prorl_envs.{module}"
    for module, names in {
        "env.answers": "is_close parse_number",
        "env.base": "Environment Grade Prompt ReferenceCall Task",
        "env.node": "Node",
        "env.registry": "example_path family load_tasks",
        "env.sandboxed": "SandboxedEnvironment sandbox_session",
        "env.scoring": "CheckResult Scoring score",
        "env.audit.audit": "audit validate",
        "env.audit.episodes": "play",
        "errors": "FailureKind InputError ModelError ProrlError SandboxError SandboxLimit ToolError"
        " UnsupportedMachine",
        "images.builder": "ImageBuilder",
        "images.modes": "ImageMode",
        "images.store": "ImageStore",
        "images.template": "ImageTemplate",
        "loggers.base": "LoggedRun RunLogger",
        "model.types": "Sampling",
        "rollout.api.batches": "BatchRequest BatchTask",
        "rollout.api.interactive": "CallRequest CallStep EpisodeRequest",
        "rollout.api.types": "AgentLimits BranchRequest GroupRequest Result Selection Trajectory",
        "rollout.client.client": "RolloutClient",
        "rollout.client.result_files": "read_results",
        "rollout.client.result_router": "ResultRouter",
        "rollout.client.sync": "SyncRolloutClient",
        "runs.statistics": "RunSummary",
        "sandbox.base": "Mount Network Sandbox SandboxLimits SandboxSpec",
        "sandbox.filesystem.python_runtime": "python_spec",
        "tools.client.python": "PythonEngine",
        "tools.client.toolbox": "Toolbox",
        "tools.pool.sandbox_session": "SandboxSession",
        "tools.schemas": "BASH EDITOR FINISH PYTHON",
        "tools.types": "ToolCall ToolResult",
    }.items()
    for name in names.split()
}

__all__ = [
    "BASH",
    "EDITOR",
    "FINISH",
    "PYTHON",
    "AgentLimits",
    "BatchRequest",
    "BatchTask",
    "BranchRequest",
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
    "audit",
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
