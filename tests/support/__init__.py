"""Fakes that only tests, benchmarks and fault injection use; users get those in `prorl_envs.testing`."""
