"""Warm pool of sandboxes, and the limit of concurrent sandbox starts. Begin with `warm_pool.py`."""
