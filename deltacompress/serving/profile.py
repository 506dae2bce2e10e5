"""What `bench serve --tune` chose for a device and a base: read, and held against where it is to be used. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from deltacompress._version import __version__
from deltacompress.checkpoints.header import load_json_object
from deltacompress.errors import CheckpointError, InputError
from deltacompress.files.canonical_json import canonical_bytes
from deltacompress.files.output import write_once
from deltacompress.files.regular import ANYWHERE, read_bytes, unreadable

SIZES = (
    "model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
"""Of config.json, what decides how long a base takes and how much it holds; the values of its weights do not."""
FORMAT = 2
"""Of profiles, one more with each change of what their times mean or are fitted to.

Of 1, which files do not say, they were fitted to full pieces of prompts in every step.
"""
OF_FREE = 0.9
"""Of the memory that a GPU has left beside the base, what variants, keys and values share; the rest is for steps."""
VARIANTS_SHARE = 0.5
"""Of that, what variants may take where nobody says how much."""
_AGAIN = "tune again: deltacompress bench serve --tune"
_MOST_BYTES = 1 << 20


class Traffic(BaseModel):
    """The requests of the piece that was replayed, as options of `bench serve` say it; seconds: of the piece."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    trace: str
    rate: PositiveFloat | None
    variation: PositiveFloat
    seconds: PositiveFloat
    popularity: str
    variants: PositiveInt
    seed: int
    scale: PositiveFloat


class Run(BaseModel):
    """One measured run of the piece, and what the simulator said of it: means of whole times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    slots: PositiveInt
    max_batch: PositiveInt
    step_tokens: PositiveInt
    measured_s: PositiveFloat
    simulated_s: PositiveFloat


class Profile(BaseModel):
    """base: its SIZES; slots: variants on the device at once, of variant_bytes each; room_bytes: that these and keys
    and values share, None where nothing bounds them; times: of the simulator, as measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: int = FORMAT
    version: str
    device: str
    backend: str
    date: str
    base: dict[str, int | str]
    recipe: str
    slots: PositiveInt
    max_batch: PositiveInt
    step_tokens: PositiveInt
    variant_bytes: PositiveInt
    room_bytes: PositiveInt | None
    times: dict[str, Any]
    traffic: Traffic
    runs: tuple[Run, ...]

    @property
    def budget_bytes(self) -> int:
        """Of variants on the device."""
        return self.slots * self.variant_bytes

    def write(self, path: Path) -> None:
        """As JSON, in the place of another profile; raises OutputError."""
        write_once(path, canonical_bytes(self.model_dump()) + b"\n", replace=True)

    def check(self, path: Path, *, device: str, config: Mapping[str, Any]) -> None:
        """Refuse another device, or a base of other sizes. path: of the profile; config: config.json of the base.

        Raises:
            InputError: it was made elsewhere, or for another base.
        """
        if device != self.device:
            raise InputError(f"was made on {self.device!r}, this is {device!r}", where=path, way_out=_AGAIN)
        own = sizes(config)
        for name in SIZES:
            if own.get(name) != self.base.get(name):
                told = f"was made for a base with {name} {self.base.get(name)}, this one has {own.get(name)}"
                raise InputError(told, where=path, way_out=_AGAIN)


def sizes(config: Mapping[str, Any]) -> dict[str, int | str]:
    """Its SIZES; those that follow from others are there, whether it says them or not."""
    found = {name: config[name] for name in SIZES if isinstance(config.get(name), int | str)}
    heads, hidden = found.get("num_attention_heads"), found.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        found.setdefault("num_key_value_heads", heads)
        found.setdefault("head_dim", hidden // heads)
    return found


def read_profile(path: Path) -> Profile:
    """Read and check one.

    Raises:
        InputError: there is none, it is none, or another version of this program made it, or one of its format.
    """
    try:
        data = load_json_object(read_bytes(path, at_most=_MOST_BYTES, links=ANYWHERE), str(path))
    except FileNotFoundError:
        raise InputError("no such file", where=path, way_out=_AGAIN) from None
    except OSError as error:
        raise unreadable(InputError, path, error) from error
    except CheckpointError as error:
        raise InputError(f"is no profile ({error.what})", where=path, way_out=_AGAIN) from error
    if "traffic" in data and data.get("version") != __version__:
        told = f"was made by version {data.get('version')!r:.40}, this is {__version__}"
        raise InputError(told, where=path, way_out=_AGAIN)
    if "traffic" in data and data.get("format", 1) != FORMAT:
        told = f"has times of format {data.get('format', 1)!r:.40}, this program's are of format {FORMAT}"
        raise InputError(told, where=path, way_out=_AGAIN)
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise InputError(f"is no profile ({at}: {first['msg']})", where=path, way_out=_AGAIN) from error
