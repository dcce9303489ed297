"""Audit of task sets without a model: do rewards tell right from wrong, every time?

Begin with `audit.py`.
"""
