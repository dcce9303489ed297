"""The rollout service, its HTTP interface and its clients.

Trainers import only `rollout.api` and `rollout.client`. Begin with `api/types.py`.
"""
