"""Types of the HTTP interface. Imports nothing else of `rollout`."""
