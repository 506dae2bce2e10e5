"""No room but models/ opens a model, a tokenizer or a config through transformers; none loads pickles or runs data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "deltacompress"
METHODS = {
    "from_pretrained",
    "from_config",
    "_from_config",
    "load_adapter",
    "load_state_dict",
    "unsafe_load",
    "full_load",
}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
BUILTINS = {"eval", "exec", "__import__", "compile"}

ALLOWED = {
    "bench/precision.py": {"Skeleton.from_config"},
    "models/config.py": {"AutoConfig", "AutoConfig.from_pretrained"},
    "models/support.py": {"AutoModelForCausalLM", "AutoModelForCausalLM.from_config"},
    "models/tokenizers.py": {"AutoTokenizer", "AutoTokenizer.from_pretrained"},
    "models/load.py": {"kind.from_pretrained"},  # of the library's own class, with None in the place of a directory
    "models/architectures/survey.py": {"Skeleton.from_config"},  # of a config that it wrote itself
    "files/strict_yaml.py": {"yaml.load"},  # with a loader of its own, stricter than the safe one
    "compression/before/prepare.py": {"Skeleton.from_config"},  # this project's
}
"""What each file uses of what follows a name in a model directory, and may: all of it, and nothing else."""


def suspects(tree: ast.AST) -> Iterator[str]:
    """Names in a module that could open what data names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            yield from (one for one in modules if one.split(".")[0] in MODULES)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                yield from (one.name for one in node.names if one.name.startswith("Auto"))
                yield from (one.name for one in node.names if one.name in ("pipeline", "load_state_dict"))
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            loads = (owner, node.attr) in {("torch", "load"), ("torch", "hub"), ("yaml", "load")}
            if loads or node.attr in METHODS or (owner == "transformers" and node.attr.startswith("Auto")):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            yield node.func.id
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
            yield f"trust_remote_code={ast.unparse(node.value)}"


def test_only_models_opens_models() -> None:
    found: dict[str, set[str]] = {}
    for file in sorted(ROOT.rglob("*.py")):
        if names := set(suspects(ast.parse(file.read_text(encoding="utf-8")))):
            found[str(file.relative_to(ROOT))] = names
    assert found == ALLOWED


def test_the_walk_sees_each_way() -> None:
    ways = {
        "import pickle": "pickle",
        "from transformers import AutoModel": "AutoModel",
        "from transformers.models.auto import AutoModel": "AutoModel",
        "import transformers\ntransformers.AutoModel": "transformers.AutoModel",
        "x.from_pretrained(path)": "x.from_pretrained",
        "make = GenerationConfig.from_pretrained": "GenerationConfig.from_pretrained",
        "torch.load(path)": "torch.load",
        "yaml.load(text, Loader)": "yaml.load",
        "f(trust_remote_code=flag)": "trust_remote_code=flag",
        "eval(text)": "eval",
    }
    for code, told in ways.items():
        assert told in set(suspects(ast.parse(code)))
