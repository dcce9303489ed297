"""Builds of Dockerfiles into layered images, in sandboxes, without Docker and without privileges."""
