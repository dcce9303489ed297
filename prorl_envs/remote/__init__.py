"""NeMo Gym resources servers as environments, over HTTP alone. Begin with `environment.py`."""
