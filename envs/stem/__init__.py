"""Questions of science, with a search tool."""
