"""Third-party agents that run in the task's sandbox: recipes, installation, execution."""
