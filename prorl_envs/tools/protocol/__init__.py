"""Messages between the host and a tool server: the only package that both sides import."""
