"""Environment `swebench`: issues of real repositories, without Docker."""
