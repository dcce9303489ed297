"""Warm pool of sandboxes, and the limit of concurrent sandbox starts."""
