"""Test doubles for users and tests: scripted model servers, a clock, a tokenizer. Begin with `server.py`."""
