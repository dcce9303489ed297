"""The command line: `prorl-envs --help`. Data goes to stdout, everything else to stderr."""
