"""Tool sets of agents: which tools of a family an agent gets, under which names, with which arguments.

A model performs best with the tools that it was trained on. An agent selects tools of a family and renames
them; several agents may share a family with its sandbox and grader.

The built-in agent `codeact` has the tool set and names of the CodeAct agent of OpenHands, with which the
ProRL Agent paper (arXiv 2603.18815) trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prorl_envs.env.base import Environment, ReferenceCall, Task
from prorl_envs.env.sandboxed import SandboxedEnvironment
from prorl_envs.errors import InputError
from prorl_envs.tools.client.arguments import read_arguments
from prorl_envs.tools.schemas import APPLY_PATCH, EDITOR, THINK
from prorl_envs.tools.types import JsonObject, ToolCall, ToolResult, ToolSpec

_UNREAD: JsonObject = {"type": "string", "description": "Not read."}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Definition of one tool of an agent.

    Args:
        tool: the family's own name of the tool; or `think`, or `apply_patch` if the family has an editor.
        description: replaces the tool's own description; None keeps it.
        arguments: maps the argument names that the model sees to the tool's own names, or to None for
            arguments that are accepted and ignored. Empty: the tool's own arguments.
        optional: skip this tool if the family does not have it.
    """

    tool: str
    description: str | None = None
    arguments: Mapping[str, str | None] = field(default_factory=dict)
    optional: bool = False


type Offers = Mapping[str, Offer]

CODEACT: Offers = {
    "execute_bash": Offer(
        tool="bash", arguments={"command": "command", "is_input": "is_input"}, optional=True
    ),
    "think": Offer(tool="think"),
    "finish": Offer(tool="finish", arguments={"message": "answer", "task_completed": None}),
    "execute_ipython_cell": Offer(tool="ipython", optional=True),
    "str_replace_editor": Offer(tool="str_replace_editor", optional=True),
    "search": Offer(tool="search", optional=True),
}
#: Agents that need no settings.
BUILT_IN: Mapping[str, Offers] = {"codeact": CODEACT}


@dataclass(frozen=True, slots=True)
class _Tool:
    """Tool of an agent: its spec for the model, the family's own tool, and the names of the arguments."""

    spec: ToolSpec
    own: ToolSpec
    arguments: Mapping[str, str | None]
    finishes: bool

    @classmethod
    def of(cls, name: str, offer: Offer, own: ToolSpec, *, finishes: bool) -> "_Tool":
        properties: JsonObject = own.parameters["properties"]
        arguments = offer.arguments or {argument: argument for argument in properties}
        known = {argument for argument in arguments.values() if argument is not None}
        if unknown := known - properties.keys():
            hint = f"its arguments: {', '.join(properties)}"
            raise InputError(f"{name}.arguments: {own.name} takes no {min(unknown)!r}", hint=hint)
        required = own.parameters.get("required", ())
        if missing := set(required) - known:
            raise InputError(f"{name}.arguments: {own.name} needs {min(missing)!r}", hint="name it too")
        parameters = {
            **own.parameters,
            "properties": {
                offered: properties[argument] if argument is not None else _UNREAD
                for offered, argument in arguments.items()
            },
            "required": [offered for offered, argument in arguments.items() if argument in required],
        }
        description = own.description if offer.description is None else offer.description
        return cls(ToolSpec(name, description, parameters), own, arguments, finishes)

    def translated(self, call: ToolCall) -> ToolCall | str:
        """Return the equivalent call of the family's own tool, or an error message for the model."""
        # An ignored argument may have any type. So may an answer, because the family parses it itself.
        given = {name: v for name, v in call.arguments.items() if self.arguments.get(name, "") is not None}
        read = read_arguments(self.spec, dict.fromkeys(given, "") if self.finishes else given)
        if isinstance(read, str):
            return read
        values = {str(self.arguments[name]): given[name] if self.finishes else read[name] for name in read}
        return ToolCall(call.id, self.own.name, values)

    def reference_call(self, call: ReferenceCall) -> ReferenceCall:
        """Translate a reference call of the family's own tool into a call of this tool. An argument that this
        tool lacks is kept, so that a replay refuses it."""
        names = {own: offered for offered, own in self.arguments.items()}
        values = {names.get(name, name): value for name, value in call.arguments.items()}
        return ReferenceCall(tool=self.spec.name, arguments=values)


def with_tools(base: type[Environment[Any]], offers: Offers, where: str) -> type[Environment[Any]]:
    """Return a subclass of `base` with these tools for its agents.

    Args:
        base: the family.
        offers: tool definitions by the tool name that the model sees.
        where: prefix of error messages, such as `agents.codeact.tools`.

    Raises:
        InputError: the family has no such tool, or no tools of its own to choose from.
    """
    if not issubclass(base, SandboxedEnvironment):
        raise InputError(f"{where}: the tools of {base.name} are its tasks' own", hint="remove tools")
    own = {spec.name: spec for spec in (*base.host_tools, *base.sandbox_tools, base.finish_spec)}
    more = (THINK, APPLY_PATCH) if EDITOR.name in own else (THINK,)
    known = {**{spec.name: spec for spec in more}, **own}
    try:
        finish_name = base.finish_spec.name
        tools = {
            name: _Tool.of(name, offer, _known(known, offer.tool, base), finishes=offer.tool == finish_name)
            for name, offer in offers.items()
            if offer.tool in known or not offer.optional
        }
    except InputError as error:
        raise InputError(f"{where}.{error.message}", hint=error.hint) from None
    return _subclass(base, tools)


def _known(known: Mapping[str, ToolSpec], name: str, base: type[Environment[Any]]) -> ToolSpec:
    if name not in known:
        raise InputError(f"{name}: {base.name} has no such tool", hint=f"it has: {', '.join(known)}")
    return known[name]


def _subclass(
    base: type[SandboxedEnvironment[Any]], tools: Mapping[str, _Tool]
) -> type[SandboxedEnvironment[Any]]:
    specs = tuple(tool.spec for tool in tools.values())
    by_own = {tool.own.name: tool for tool in tools.values()}
    chosen = [tool.own for tool in tools.values() if tool.own.name != THINK.name]
    host = {spec.name for spec in base.host_tools}

    async def call(
        self: SandboxedEnvironment[Any], call: ToolCall, *, timeout_s: float | None = None
    ) -> ToolResult:
        if (tool := tools.get(call.name)) is None:
            known = ", ".join(tools)
            return ToolResult(text=f"There is no tool {call.name[:100]!r}. The tools are: {known}.", ok=False)
        inner = tool.translated(call)
        if isinstance(inner, str):
            return ToolResult(text=inner, ok=False)
        if tool.own is THINK:
            return ToolResult(text="Noted.")
        return await base.call(self, inner, timeout_s=timeout_s)

    def load(cls: type[SandboxedEnvironment[Any]], row: Mapping[str, Any]) -> Task:
        task = base.load.__func__(cls, row)  # type: ignore[attr-defined]  # the class decides the task's type
        calls = [by_own[c.tool].reference_call(c) if c.tool in by_own else c for c in task.reference]
        return task.model_copy(update={"reference": tuple(calls)})  # type: ignore[no-any-return]

    finish = by_own.get(base.finish_spec.name)
    fields: dict[str, Any] = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "finish_tool": finish.spec.name if finish else "",
        "sandbox_tools": tuple(
            spec for spec in chosen if spec.name not in host and spec is not base.finish_spec
        ),
        "host_tools": tuple(spec for spec in chosen if spec.name in host),
        "tools": property(lambda self: specs),
        "call": call,
        "load": classmethod(load),
    }
    return type(base.__name__, (base,), fields)
