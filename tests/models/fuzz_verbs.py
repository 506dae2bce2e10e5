"""What the fuzzer of model directories runs: tiny models of several architectures, and every way of opening one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pairs import make_pair

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.restoration import restore
from deltacompress.calibration.data import load_calibration
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.compression.driver import compress
from deltacompress.evaluation.scoring.checkpoints import PlainServing
from deltacompress.evaluation.scoring.scorer import Scorer
from deltacompress.evaluation.scoring.serving import Prompt, Row
from deltacompress.evaluation.tasks.encoding import Encoder, check_same_tokenizer
from deltacompress.models.skeleton import Skeleton
from deltacompress.models.tokenizers import load_tokenizer
from deltacompress.runtime import DeltaConfig, Runtime

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_key_value_heads": 1},
    "qwen2-tied": SMALL | {"num_key_value_heads": 1},
    "gemma2": SMALL | {"num_key_value_heads": 1, "head_dim": 8, "layer_types": ["full_attention"]},
    "gpt-neox": SMALL,
    "phi3": SMALL | {"num_key_value_heads": 1},
    "mixtral": SMALL | {"num_key_value_heads": 1},
    "gpt2": {},
}
DENSE = ("llama", "qwen2-tied", "gemma2", "gpt-neox", "phi3")
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['role'] }} {{ message['content'] }} w9{% endfor %}"
DECOYS = (
    *("other.safetensors", "adapter_config.json", "adapter_model.bin", "adapter_model.safetensors", "evil.py"),
    *("config.4.0.0.json", "tokenizer.1.0.0.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf"),
    *("additional_chat_templates/evil.jinja", "custom_generate/generate.py", "processor_config.py", "params.json"),
)
"""Files that must stay closed, under the names that transformers knows and those that mutations name."""


@dataclass(frozen=True)
class Models:
    """A pair of one architecture and a delta of it, each with every side file and every decoy."""

    base: Path
    finetuned: Path
    delta: Path
    data: Path
    scratch: Path


def make_models(root: Path, architecture: str) -> Models:
    """Make them below `root`."""
    pair = make_pair(root / "pair", architecture, **ARCHITECTURES[architecture])
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    side_files: dict[str, Any] = {
        "tokenizer_config.json": plain | {"chat_template": TEMPLATE},
        "special_tokens_map.json": {"bos_token": "<s>", "pad_token": {"content": "<pad>"}},
        "added_tokens.json": {"<pad>": 0},
        "generation_config.json": {"eos_token_id": [2], "temperature": 0.5},
    }
    for folder in (pair.base, pair.finetuned):
        for name, content in side_files.items():
            if not architecture.startswith("qwen2") or name != "tokenizer_config.json":  # as in make_pair
                (folder / name).write_text(json.dumps(content))
    compress(pair.base, pair.finetuned, recipe="lossless", out=root / "delta", device="cpu")
    (root / "scratch").mkdir()
    for folder in (pair.base, pair.finetuned, root / "delta"):
        for name in DECOYS:
            if name == "adapter_config.json" and folder == pair.base:
                continue  # the plug-in refuses that before it looks at anything else
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("{}")
    return Models(pair.base, pair.finetuned, root / "delta", pair.data, root / "scratch")


_runtimes: dict[Path, Runtime] = {}


def _runtime(base: Path) -> Runtime:
    """Of a base that is never spoiled; made once."""
    if base not in _runtimes:
        _runtimes[base] = Runtime.from_base(base)
    return _runtimes[base]


def calibrate(at: Models) -> None:
    """What compress does with the fine-tuned model: its tokenizer, and the walk."""
    checkpoint = Checkpoint.open(at.finetuned)
    skeleton = Skeleton.from_config(at.finetuned, checkpoint.tensors, device="cpu")
    skeleton.check_shapes({name: info.shape for name, info in checkpoint.tensors.items()})
    tokenizer = load_tokenizer(at.finetuned)
    tokens = load_calibration(at.data, tokenizer, samples=1, seq_len=4, seed=0)
    skeleton.load(checkpoint.tensors, checkpoint.read)
    hidden, calls = skeleton.capture(tokens.ids.clamp(max=7))
    for i in range(skeleton.num_layers):
        hidden = skeleton.run_layer(i, hidden, calls[i])
    skeleton.run_head(hidden)


def reference(at: Models) -> None:
    """What eval does with the fine-tuned model: tokenizer, weights, scores and answers."""
    checkpoint = Checkpoint.open(at.finetuned)
    encoder = Encoder.open(at.finetuned, checkpoint.config)
    check_same_tokenizer(at.finetuned, encoder, at.base)
    scorer = Scorer(PlainServing.open(checkpoint))
    before, after = encoder.pair("w1 w2", " w3")
    ids = [tuple(min(one, 7) for one in part) for part in (before, after)]
    scorer.loglikelihood([Row(None, *ids), Row(None, ids[0], (*ids[1], 5))])
    encoder.text(list(scorer.generate([Prompt(None, ids[0], 2)], eos=encoder.eos)[0]))


def serve_base(at: Models) -> None:
    """generate, with a base that came from elsewhere."""
    runtime = Runtime.from_base(at.base)
    runtime.generate([(None, "w1 w2"), (None, [5, 6])], 2)


def chat_base(at: Models) -> None:
    """chat: only the base's tokenizer."""
    tokenizers = _runtime(at.finetuned)._tokenizers.__class__(at.base)
    tokenizers.chat(None, [{"role": "user", "content": "w1"}])
    tokenizers.decoder(None)(tokenizers.encode(None, "w1 w2", bos=None))


def serve_delta(at: Models) -> None:
    """generate and chat, with a delta that came from elsewhere."""
    runtime = _runtime(at.base)
    name = runtime.load(at.delta)
    try:
        runtime.generate([(name, "w1 w2"), (name, [5, 6])], 2)
        runtime.chat_ids(name, [{"role": "user", "content": "w1"}])
    finally:
        runtime.unload(name)


def restore_delta(at: Models) -> None:
    """inspect, verify, restore; and what compare does with the checkpoint."""
    load_delta(at.delta).summary()
    verify(at.delta)
    out = at.scratch / "restored"
    shutil.rmtree(out, ignore_errors=True)
    restore(at.delta, base=at.base, out=out)
    Scorer(PlainServing.open(out)).loglikelihood([Row(None, (5, 6), (7,))])


@torch.inference_mode()
def plug_in(at: Models) -> None:
    """transformers loads the base, and the delta is attached to it."""
    config = DeltaConfig(delta=at.delta)
    model = transformers.AutoModelForCausalLM.from_pretrained(at.base, quantization_config=config, dtype=torch.float32)
    model(torch.tensor([[5, 6, 7]]))


@dataclass(frozen=True)
class Verb:
    """run: on spoiled models. spoils: which directory. dense: only of architectures that can be walked. own: whether
    all that happens there is this project's doing; transformers itself opens the base that is plugged into.
    """

    run: Callable[[Models], None]
    spoils: str
    dense: bool = True
    own: bool = True


VERBS = {
    "calibrate": Verb(calibrate, "finetuned"),
    "reference": Verb(reference, "finetuned", dense=False),
    "generate": Verb(serve_base, "base"),
    "chat": Verb(chat_base, "base"),
    "variant": Verb(serve_delta, "delta"),
    "restore": Verb(restore_delta, "delta", dense=False),
    "plug-in": Verb(plug_in, "delta"),
    "plug-in base": Verb(plug_in, "base", own=False),
}
