"""Models of the Hugging Face hub: which names may be one of theirs, and how it is fetched, safetensors and side files
only.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from deltacompress.checkpoints.side_files import SIDE_FILES
from deltacompress.checkpoints.weight_files import INDEX
from deltacompress.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def model_directory(path: str | Path) -> Path | None:
    """The directory that `path` is; None: there is none, and it may be the id of a model of the hub. Asks nobody.

    `org/name` is no id where a directory `org` is: then it is a slip in a path, and nobody on the network need know.

    Raises:
        CheckpointError: neither.
    """
    root = Path(path)
    if root.is_dir():
        return root
    if root.exists():
        raise CheckpointError(
            "not a directory", where=root, way_out="give the directory that holds config.json and the weights"
        )
    if not _HUB_ID.fullmatch(str(path)) or root.parent.exists():
        raise CheckpointError(
            "no such directory", where=root, way_out="give one with config.json and the weights, or a hub id: org/name"
        )
    return None


def hub_origin(path: Path) -> tuple[str, str | None]:
    """(name, revision) of a checkpoint directory: hub id and commit in a hub cache, else the directory's own name."""
    whole = path.absolute()
    repository, kind, commit = whole.parent.parent.name, whole.parent.name, whole.name
    if kind == "snapshots" and repository.startswith("models--") and _COMMIT.fullmatch(commit):
        return repository.removeprefix("models--").replace("--", "/"), commit
    return whole.resolve().name, None


def fetched(model: str) -> Path:
    """The local copy of a model of the hub: its config, its safetensors and its tokenizer.

    Raises:
        CheckpointError: it cannot be fetched, and is not here from an earlier time.
    """
    from huggingface_hub import snapshot_download  # only here: local work needs no hub client

    # `model*`: repositories that also carry consolidated.safetensors would be fetched twice over.
    patterns = [*SIDE_FILES, "model*.safetensors", INDEX]
    missing = "no such directory, and "
    try:
        look_up_host()
    except ConnectionError as error:
        try:
            return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=True))
        except (OSError, ValueError):
            told = f"{missing}no network to fetch it from the hub"
            raise CheckpointError(told, where=model, way_out="mend the path, or give a model's directory") from error
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are all one of these
        why = str(error).strip().partition("\n")[0]
        told = f"{missing}not fetched from the hub either ({why})"
        raise CheckpointError(
            told, where=model, way_out="mend the path, or download the model and give its directory"
        ) from error


def look_up_host() -> None:
    """Fail at once where the hub's host has no address: the client would try again and again for half a minute.

    Raises:
        ConnectionError: no such host. (A proxy looks names up itself; and a client told to stay offline asks nobody.)
    """
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if getproxies() or any(os.environ.get(name) for name in _OFFLINE):
        return
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        raise ConnectionError(f"{host}: {error}") from error
