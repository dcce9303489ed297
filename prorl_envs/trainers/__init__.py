"""Adapters of trainers: each converts results to one trainer's rows.

They use the client of the service only.
"""
