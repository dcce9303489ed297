"""How models write tool calls: the formats, and the detection of a model's format. Begin with `choice.py`."""
