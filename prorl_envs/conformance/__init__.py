"""Promises that every sandbox driver keeps, as a suite to be run against any of them."""
