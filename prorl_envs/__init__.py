"""Agentic RL environments for NeMo Gym on fast rootless sandboxes, served as rollouts.

Importing this package imports neither NeMo Gym, Ray nor torch.
"""

__version__ = "0.1.0"
