"""A checkpoint's own files must not choose what is loaded: each attack, on each directory, in each room."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.rooms import ROOMS, Case, make_case, spoiled
from models.watch import Watch
from pairs import Pair, remove
from safetensors.torch import load_file, save_file

from deltacompress.checkpoints.reader import is_side_file
from deltacompress.errors import CheckpointError, DeltaCompressError
from deltacompress.files.content import content_root

OPENS = {  # which directories a room opens
    "calibration": ("finetuned",),
    "generate": ("base", "delta"),
    "chat": ("base", "delta"),
    "evaluation": ("base", "finetuned", "delta"),
    "plug-in": ("base", "delta"),
}
PLACES = [(room, which) for room, opened in OPENS.items() for which in opened]


class Deed:
    """A pickle of this runs."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def configure(folder: Path, **fields: Any) -> None:
    """Add fields to a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def other_weights(folder: Path) -> None:
    """Weights that are not hashed, named by the config."""
    weights = load_file(folder / "model.safetensors")
    save_file({name: torch.zeros_like(w) for name, w in weights.items()}, folder / "other.safetensors")
    configure(folder, transformers_weights="other.safetensors")


def pickled_weights(folder: Path) -> None:
    """The same with a pickle that runs, under the one name that transformers takes."""
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Deed(folder / "ran")))
    configure(folder, transformers_weights="adapter_model.bin")


def other_config(folder: Path) -> None:
    """Another config, named by this one."""
    (folder / "config.4.0.0.json").write_bytes((folder / "config.json").read_bytes())
    configure(folder, configuration_files=["config.4.0.0.json"])


def other_modules(folder: Path) -> None:
    configure(folder, fusion_config={"patch_embeddings": True})


def adapter(folder: Path) -> None:
    """A LoRA beside the weights, which transformers applies where PEFT is installed."""
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 64, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")


def kernels(folder: Path) -> None:
    configure(folder, attn_implementation="kernels-community/flash-attn3", experts_implementation="acme/experts")


def unknown_attention(folder: Path) -> None:
    configure(folder, _attn_implementation="no such thing", attn_implementation={"": "neither"})


def code(folder: Path) -> None:
    """Classes of the checkpoint's own, beside it."""
    (folder / "evil.py").write_text("from pathlib import Path\n\nPath('ran').touch()\n")
    configure(folder, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    file.write_text(json.dumps(settings))


def other_tokenizer(folder: Path) -> None:
    """A vocabulary that lies elsewhere, in each field that transformers has taken one from."""
    elsewhere = folder.parent / "elsewhere.json"
    elsewhere.write_text("{}")
    names = ("tokenizer_file", "vocab_file", "merges_file", "chat_template_file", "name_or_path")
    fields = dict.fromkeys(names, str(elsewhere)) | {"fast_tokenizer_files": ["tokenizer.1.0.0.json"]}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        known = json.loads(file.read_text()) if file.is_file() else {}
        known.pop("added_tokens_decoder", None)
        file.write_text(json.dumps(known | fields))


FIELDS = {"transformers_weights", "configuration_files", "fusion_config"}
NOTES = (
    "adapter_config.json: not applied",
    "attn_implementation (how it is computed is chosen here)",
    "auto_map (code that comes with a checkpoint is never run)",
)
"""What is told of what is left out."""
REFUSED = [other_weights, pickled_weights, other_config, other_modules]
LEFT_OUT = [adapter, kernels, unknown_attention, code, other_tokenizer]


@pytest.fixture(scope="module", autouse=True)
def compiled(make_pair: Callable[..., Pair], tmp_path_factory: pytest.TempPathFactory) -> None:
    """numba keeps what it compiles as pickles, of its own making: they are read before anyone watches."""
    ROOMS["calibration"](make_case(make_pair("llama"), tmp_path_factory.mktemp("compiled")))


@pytest.fixture
def case(make_pair: Callable[..., Pair], tmp_path: Path) -> Case:
    return make_case(make_pair("llama"), tmp_path)


def allowed(name: str) -> bool:
    """Whether a file of a model directory may be opened: weights, index, side files, manifest and shards."""
    return name in ("model.safetensors", "manifest.json") or name.startswith("delta-") or is_side_file(name)


def run(room: str, case: Case) -> tuple[Any, Watch]:
    """Run a room, and make sure that it opened nothing else; its result, or the error that it raised."""
    folders = (case.base, case.finetuned, case.delta)
    with Watch(*folders, ours=[case.scratch, case.data, content_root()]) as seen:
        try:
            found: Any = ROOMS[room](case)
        except DeltaCompressError as error:
            found = error
    for folder, names in seen.opened.items():
        odd = {name for name in names if not allowed(name)}
        assert not odd or (room, folder, odd) == ("plug-in", case.base, {"config.4.0.0.json"})  # before anyone is asked
        assert names or room != "evaluation"
    assert not [one for one in seen.elsewhere if not one.endswith((".py", ".pyc"))]  # modules imported on the way
    assert not [event for event, _ in seen.deeds if event != "subprocess.Popen"]
    assert not list(case.base.parent.rglob("ran"))
    return found, seen


@pytest.mark.parametrize(("room", "which"), PLACES)
@pytest.mark.parametrize("attack", REFUSED, ids=lambda attack: attack.__name__)
def test_what_would_load_something_else_is_refused(
    case: Case, attack: Callable[[Path], None], room: str, which: str, lm_eval: None
) -> None:
    found, _ = run(room, spoiled(case, attack, which))
    assert isinstance(found, DeltaCompressError), found
    field = next(iter(set(json.loads((getattr(case, which) / "config.json").read_text())) & FIELDS))
    assert f"config.json: {field}: it " in str(found)
    assert "remove that line" in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize(("room", "which"), PLACES)
def test_what_nothing_needs_changes_nothing(case: Case, room: str, which: str, lm_eval: None) -> None:
    plain, _ = run(room, case)
    for made in ("out", "report", "restored", "tasks"):
        remove(case.scratch / made)
    by_transformers = (room, which) == ("plug-in", "base")

    def all_at_once(folder: Path) -> None:
        for attack in LEFT_OUT:
            if attack is not adapter or not by_transformers:
                attack(folder)

    found, _ = run(room, spoiled(case, all_at_once, which))
    assert not isinstance(found, Exception), found
    assert torch.equal(found, plain) if isinstance(plain, torch.Tensor) else found == plain
    if room not in ("chat", "plug-in"):
        for told in NOTES if which != "delta" else ():
            assert any(told in note for note in case.notes)


def test_transformers_itself_would_apply_an_adapter(case: Case) -> None:
    """Here the library loads the base, so all that can be done is to stop it, where PEFT is installed or not."""
    adapter(case.base)
    with pytest.raises(
        CheckpointError, match=r"adapter_config\.json: transformers would apply this adapter to the base"
    ):
        ROOMS["plug-in"](case)
