"""File tools: reading, editing, patching, undo."""
