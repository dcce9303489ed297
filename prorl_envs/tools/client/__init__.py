"""Host side of the tools."""
