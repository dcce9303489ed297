"""Shell tasks."""
