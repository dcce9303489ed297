"""A small model learns to use a shell: with a real trainer and model server, and the whole system between."""
