"""Specifications of the built-in tools, as sent to the model."""

from prorl_envs.tools.types import JsonObject, ToolSpec


def _object(properties: JsonObject, *required: str) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


BASH = ToolSpec(
    name="bash",
    description=(
        "Run a command in a bash shell that stays open: its directory, variables, functions and background "
        "jobs are still there at the next call. Prints stdout and stderr as a terminal would. Long output is "
        "cut in the middle. The call also returns when the command waits for input; it can then be answered "
        "by a call with `is_input`, or interrupted."
    ),
    parameters=_object(
        {
            "command": {
                "type": "string",
                "description": "One or more lines of bash; or, with `is_input`, what to type.",
            },
            "is_input": {
                "type": "boolean",
                "description": (
                    "True types `command` and an Enter into the command that waits for input. `C-c`, `C-d` "
                    "and other control keys are typed alone; an empty text waits for more output."
                ),
            },
            "session": {
                "type": "string",
                "description": "Name of another shell, which is opened at first use. Usually left out.",
            },
            "restart": {
                "type": "boolean",
                "description": "True starts the session's shell anew before `command`, which may be empty.",
            },
        },
        "command",
    ),
)

PYTHON = ToolSpec(
    name="ipython",
    description=(
        "Run a cell in an IPython session that stays open: variables and imports are still there at the next "
        "call. Shows what is printed, the value of a last expression, and tracebacks. `input()` is not "
        "available."
    ),
    parameters=_object(
        {"code": {"type": "string", "description": "The cell: Python, with IPython's magics."}},
        "code",
    ),
)

EDITOR = ToolSpec(
    name="str_replace_editor",
    description=(
        "View, create and edit files. `view` numbers a file's lines, or lists a directory two levels deep. "
        "`create` writes a new file and does not overwrite. `str_replace` replaces `old_str`, which must "
        "occur exactly once, so include enough lines around it. `insert` puts `new_str` after line "
        "`insert_line`. `undo_edit` takes back the last change of a file."
    ),
    parameters=_object(
        {
            "command": {
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
                "description": "What to do.",
            },
            "path": {"type": "string", "description": "Absolute path of the file or directory."},
            "file_text": {"type": "string", "description": "For `create`: the content."},
            "old_str": {"type": "string", "description": "For `str_replace`: the text to replace, exactly."},
            "new_str": {
                "type": "string",
                "description": "For `str_replace`: what comes instead. For `insert`: the text.",
            },
            "insert_line": {
                "type": "integer",
                "description": "For `insert`: the line after which to insert; 0 is the start of the file.",
            },
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For `view` of a file: first and last line, counted from 1; -1 is the end.",
            },
        },
        "command",
        "path",
    ),
)

APPLY_PATCH = ToolSpec(
    name="apply_patch",
    description=(
        "Change files by a patch: all of it is applied, or nothing. It begins with `*** Begin Patch` and "
        "ends with `*** End Patch`; between them stand `*** Add File: PATH` with lines that begin with `+`, "
        "`*** Delete File: PATH`, and `*** Update File: PATH`, perhaps with `*** Move to: PATH`, and hunks. "
        "A hunk begins with `@@`, perhaps followed by a line that leads to it, such as a function's first; "
        "its lines begin with a space (stays), `-` (goes) or `+` (comes). Show about three unchanged lines "
        "around each change. `*** End of File` after a hunk says that it ends the file. A unified diff is "
        "taken too."
    ),
    parameters=_object(
        {
            "input": {
                "type": "string",
                "description": "The patch. Paths are relative to the workspace, or absolute.",
            }
        },
        "input",
    ),
)

FINISH = ToolSpec(
    name="finish",
    description="Declare that the task is done. Nothing can be run afterwards.",
    parameters=_object(
        {"answer": {"type": "string", "description": "The answer, where the task asks for one."}}
    ),
)

THINK = ToolSpec(
    name="think",
    description="Write a thought down. Nothing is run or changed, and nothing new is learned by it.",
    parameters=_object({"thought": {"type": "string", "description": "The thought."}}, "thought"),
)
