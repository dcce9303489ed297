"""What goes wrong on real machines, done on purpose: no GPU, no model, and the same each time with a seed."""
