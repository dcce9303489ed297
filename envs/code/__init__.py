"""Environment `code`: programming problems with hidden tests."""
