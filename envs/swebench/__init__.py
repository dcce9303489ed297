"""SWE-bench instances rebuilt from source releases, without Docker."""
