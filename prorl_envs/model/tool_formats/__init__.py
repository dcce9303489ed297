"""How models write tool calls: one module per format, and the detection of the format."""
