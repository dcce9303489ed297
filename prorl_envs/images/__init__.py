"""Images of sandboxes: sources, builds, pulls and their store. Used by `env`, `nemo`, `app` and `cli`."""
