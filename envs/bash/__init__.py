"""Environment `bash`: shell tasks."""
