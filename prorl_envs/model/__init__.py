"""Clients of model servers, chat templates and tokens. Used by `rollout`, `app` and `cli`."""
