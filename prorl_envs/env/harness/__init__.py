"""Third-party agents in the task's sandbox: recipes, installation. Begin with `recipe.py`."""
