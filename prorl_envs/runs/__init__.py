"""Run folders and their statistics."""
