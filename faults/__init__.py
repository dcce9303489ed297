"""Fault injection: failures of real machines, without GPU or model, reproducible with a seed."""
