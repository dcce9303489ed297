"""The promises: one module per theme."""
