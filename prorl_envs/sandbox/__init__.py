"""Rootless sandboxes: drivers, limits, network and files.

Imports no package of this project but `errors` and `extras`. Begin with `base.py`.
"""
