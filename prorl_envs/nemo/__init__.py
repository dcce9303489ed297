"""Integration with NeMo Gym: resources servers, the agent, the sandbox provider, rows.

Nothing else imports it.
"""
