"""Loggers of a run's metrics: W&B, MLflow, TensorBoard, and those of other packages. Begin with `base.py`."""
