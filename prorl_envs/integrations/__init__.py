"""Sandboxes for other frameworks, which replace Docker there: one module per framework.

Begin with `sandbox.py`.
"""
