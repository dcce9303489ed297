"""Fakes for tests, benches and fault injection. Fakes for users are in `prorl_envs.testing`."""
