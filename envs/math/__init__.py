"""Environment `math`: mathematical problems with an answer."""
