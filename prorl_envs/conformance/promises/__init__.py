"""The promises, one module a theme."""
