"""Integration with NeMo Gym: resources servers, the agent, the sandbox provider, rows.

No other package imports it.
"""
