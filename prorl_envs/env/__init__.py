"""Base of environments: tasks, the sandboxed environment, graders, tools, agents.

Used by every family in `envs`. Begin with `base.py`.
"""
