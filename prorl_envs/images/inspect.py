"""Description of an image."""

import msgspec

from prorl_envs.errors import InputError, expand_user
from prorl_envs.images.store import ImageStore
from prorl_envs.sandbox.filesystem.sif import labels, system_partition


def inspect(store: ImageStore, source: str) -> str:
    """Return JSON with the labels of an image and its entry in the cache. Runs no program of the image.

    Args:
        source: id of an image in the store, or the path of a SIF.

    Raises:
        InputError: there is no such image.
        SandboxError: the file is not a SIF.
    """
    entry = next((entry for entry in store.entries() if entry.id == source), None)
    path = store.image(entry) if entry else expand_user(source).absolute()
    if not path.is_file():
        raise InputError(f"no such image: {source}", hint="prorl-envs image list")
    partition = system_partition(path)
    found = {
        "path": str(path),
        "labels": labels(path),
        "system": {"offset": partition.offset, "size": partition.size},
        "entry": entry,
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
