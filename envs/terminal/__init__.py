"""Tasks of a terminal in an image of their own: Harbor and Terminal-Bench task directories."""
