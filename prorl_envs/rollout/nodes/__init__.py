"""Other machines that run jobs. Knows no transport (`app.ray`). Begin with `worker.py`."""
