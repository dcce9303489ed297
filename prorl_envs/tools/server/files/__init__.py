"""File tools: reading, editing, patching, undo. Begin with `editor.py`."""
