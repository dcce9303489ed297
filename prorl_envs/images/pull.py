"""Pull of one image through spython: `python -I -m prorl_envs.images.pull PROGRAM ADDRESS FILE`.

It runs as a separate program under the supervisor, because spython prints, exits on unexpected errors, and
uses the environment unchanged. spython calls `singularity`, so a link of that name is created for it.
"""

import os
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Pull the image; return the exit status of the builder."""
    program, address, image = arguments
    folder = Path(image).parent / "bin"
    folder.mkdir()
    (folder / "singularity").symlink_to(program)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    # Imported here because the import is slow.
    from spython.main import Client

    _, lines = Client.pull(address, name=image, stream=True, quiet=True)
    try:
        for line in lines:
            sys.stdout.write(line)
            sys.stdout.flush()
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
