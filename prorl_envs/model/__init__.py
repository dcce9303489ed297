"""Clients of model servers, and the tokens that they exchange. Used by `rollout`, `app` and `cli`."""
