"""Mathematical problems with an answer."""
