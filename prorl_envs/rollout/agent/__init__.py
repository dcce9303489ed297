"""Agent loop of one job, with its limits and its token ledger. Begin with `agent_loop.py`."""
