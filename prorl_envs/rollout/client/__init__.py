"""Clients of the rollout service."""
