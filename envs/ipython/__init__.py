"""Environment `ipython`: data and computation tasks in a Python session."""
