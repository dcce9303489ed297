"""Adapters of trainers. Each converts results to the rows of one trainer.

They access the service only by its client. Begin with `rows.py`.
"""
