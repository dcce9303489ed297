"""Environment `terminal`: tasks with their own images, as task directories of Harbor and Terminal-Bench."""
