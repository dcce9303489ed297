"""Tables, progress and errors on the terminal. Begin with `console.py`."""
