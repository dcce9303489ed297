"""Agents as others wrote them, run in the sandbox beside what they work on: recipes, installing, running."""
