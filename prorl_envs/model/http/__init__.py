"""HTTP client for model servers."""
