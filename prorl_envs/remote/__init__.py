"""Environments of NeMo Gym resources servers that run elsewhere or are started here, over HTTP only."""
