"""Agent loop of one job, with its limits and its token ledger."""
