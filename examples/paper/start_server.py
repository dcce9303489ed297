"""Start this package's service in place of the ProRL Agent paper's server.

The paper's `run_math.py` and `run_swe.py` start the `start_server.py` beside them: put this file there. It
accepts the options of that server. The model's tokenizer and all other settings come from `PRORL_...`
variables, or from the file that `ROLLOUT_CONFIG` names. A reward server is not needed: the service computes
rewards itself.
"""

import argparse
import os
import sys


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Start prorl-envs serve with the options of the paper's server."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="8006")
    known, others = parser.parse_known_args()
    if others:
        print(f"start_server.py: ignored: {' '.join(others)}", file=sys.stderr)
    command = ["prorl-envs", "serve", "--no-token", "--host", known.host, "--port", known.port]
    if config := os.environ.pop("ROLLOUT_CONFIG", ""):
        command += ["--config", config]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
