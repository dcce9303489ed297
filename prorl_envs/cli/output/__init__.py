"""Tables, progress and errors on the terminal."""
