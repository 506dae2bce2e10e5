"""Do the matrices of an adapter fit the tensors of a base? Pure arithmetic over names and shapes.

What PEFT 0.21 saves, <module> being a module of the base:

    LoRA   base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]; lora_embedding_A [r, rows],
           lora_embedding_B [dim, r] for an embedding; .lora_B.bias [out] with lora_bias
    BOFT   base_model.model.<module>.boft_R [m, D, b, b], m butterfly factors, D blocks of b columns, D * b = in;
           .boft_s [out, 1]
    both   base_model.model.<module>.weight and .bias, whole, for modules_to_save and trained biases;
           <module>.base_layer.bias where <module> has matrices too, and .base_layer.weight of an embedding or head
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from deltacompress.adapters.settings import AdapterConfig

Shape = tuple[int, ...]
_PREFIX = "base_model.model."
_WRAPPED = ".base_layer"
_LORA = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_B.bias": "bias",
    "lora_embedding_A": "EA",
    "lora_embedding_B": "EB",
}
_BOFT = {"boft_R": "R", "boft_s": "s"}


def check_tensors(adapter: Mapping[str, Shape], settings: AdapterConfig, base: Mapping[str, Shape]) -> int:
    """How many modules of the base the adapter changes.

    adapter, base: tensor name -> shape.

    Raises:
        ValueError: one line without the file's name: which tensor does not fit, and how.
    """
    known = _LORA if settings.kind == "lora" else _BOFT
    modules: dict[str, dict[str, Shape]] = {}
    whole: list[str] = []
    for name, shape in adapter.items():
        if not name.startswith(_PREFIX):
            raise ValueError(f"tensor {name} does not begin with {_PREFIX}, as PEFT's do")
        for suffix, role in known.items():
            if name.endswith("." + suffix):
                modules.setdefault(name[len(_PREFIX) : -len(suffix) - 1], {})[role] = shape
                break
        else:
            whole.append(name)
    for name in whole:
        _check_whole(name, adapter[name], settings, base, modules)
    if not modules:
        raise ValueError(f"holds no {settings.kind} matrices")
    for module, parts in modules.items():
        if not _is_target(module, settings.targets):
            raise ValueError(f"module {module} is not among target_modules")
        weight = _weight_of(module, base)
        if settings.kind == "lora":
            _check_lora(module, parts, weight, settings)
        else:
            _check_boft(module, parts, weight, settings)
    if isinstance(settings.targets, tuple):
        for target in settings.targets:
            if not any(_is_target(module, (target,)) for module in modules):
                raise ValueError(f"has no matrices for its target module {target}")
    return len(modules)


def _check_lora(module: str, parts: Mapping[str, Shape], weight: Shape, settings: AdapterConfig) -> None:
    rank = _rank(module, settings)
    wanted: dict[str, Shape] = {}
    if parts.keys() >= {"EA", "EB"} and parts.keys() <= {"EA", "EB"}:
        rows, columns = weight
        wanted |= {"EA": (rank, rows), "EB": (columns, rank)}
    elif parts.keys() >= {"A", "B"} and parts.keys() <= {"A", "B", "bias"}:
        outputs, inputs = reversed(weight) if settings.transposed else weight
        wanted |= {"A": (rank, inputs), "B": (outputs, rank), "bias": (outputs,)}
        if "bias" in parts and not settings.biased:
            raise ValueError(f"module {module} has a lora_B.bias, but lora_bias is not set")
    else:
        raise ValueError(f"module {module} has {', '.join(sorted(parts))} only; A and B belong together")
    for role, shape in parts.items():
        _same(module, f"lora {role}", shape, wanted[role])


def _check_boft(module: str, parts: Mapping[str, Shape], weight: Shape, settings: AdapterConfig) -> None:
    if parts.keys() != {"R", "s"}:
        raise ValueError(f"module {module} has {', '.join(sorted(parts))} only; boft_R and boft_s belong together")
    outputs, inputs = reversed(weight) if settings.transposed else weight
    block = settings.block or (inputs // settings.blocks if settings.blocks else 0)
    if not block or inputs % block:
        raise ValueError(f"module {module}: {inputs} columns are no whole number of blocks of {block}")
    # PEFT falls back to one factor where its CUDA extension is missing, whatever the config asks for.
    factors = 1 if parts["R"][:1] == (1,) else settings.factors
    _same(module, "boft_R", parts["R"], (factors, inputs // block, block, block))
    _same(module, "boft_s", parts["s"], (outputs, 1))


def _check_whole(
    name: str, shape: Shape, settings: AdapterConfig, base: Mapping[str, Shape], modules: Mapping[str, Collection[str]]
) -> None:
    """A tensor that replaces one of the base. modules: those that have matrices, and which."""
    module, _, leaf = name[len(_PREFIX) :].rpartition(".")
    if leaf not in ("weight", "bias"):
        raise ValueError(f"tensor {name} is no matrix of a {settings.kind} adapter")
    wrapped = module.endswith(_WRAPPED)
    module = module.removesuffix(_WRAPPED)
    if wrapped and module not in modules:
        raise ValueError(f"tensor {name} is whole, but {module} has no matrices")
    beside = wrapped and ("EA" in modules[module] or _is_target(module, ("lm_head",)))
    if leaf == "weight" and not beside and not _is_target(module, settings.saved):
        raise ValueError(f"tensor {name} is whole, but {module} is not among modules_to_save")
    found = _find(f"{module}.{leaf}", base)
    if found is None:
        raise ValueError(f"tensor {module}.{leaf} is not in the base")
    _same(module, leaf, shape, base[found])


def _weight_of(module: str, base: Mapping[str, Shape]) -> Shape:
    found = _find(f"{module}.weight", base)
    if found is None:
        raise ValueError(f"module {module} is not in the base")
    if len(base[found]) != 2:
        raise ValueError(f"module {module} has a weight of shape {list(base[found])} in the base, not a matrix")
    return base[found]


def _find(name: str, base: Mapping[str, Shape]) -> str | None:
    """A module's tensor under its name in the checkpoint: some leave out its prefix, a tied head is absent."""
    _, _, short = name.partition(".")
    for candidate in (name, short, f"model.{name}"):
        if candidate in base:
            return candidate
    if name == "lm_head.weight":
        tables = [one for one in base if one.endswith(("embed_tokens.weight", "wte.weight"))]
        return tables[0] if len(tables) == 1 else None
    return None


def _rank(module: str, settings: AdapterConfig) -> int:
    for pattern, rank in settings.ranks.items():
        if module == pattern.lstrip("^") or module.endswith("." + pattern):
            return rank
    return settings.rank


def _is_target(module: str, targets: str | tuple[str, ...]) -> bool:
    """As PEFT matches a list: whole names or their last parts."""
    if isinstance(targets, tuple):
        return any(module == one or module.endswith("." + one) for one in targets)
    return True  # an expression out of a file may take for ever to match, so none is run; the shapes are checked


def _same(module: str, what: str, shape: Shape, wanted: Shape) -> None:
    if shape != wanted:
        raise ValueError(f"module {module}: {what} has shape {list(shape)}, the base needs {list(wanted)}")
