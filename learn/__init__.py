"""Experiment: a small model learns to use a shell, with a real trainer, model server and the whole system."""
