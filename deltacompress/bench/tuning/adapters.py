"""Adapters as PEFT trains them; low rank and sparse together, which it does not have, as RoSA has it
(https://arxiv.org/abs/2401.04679): the entries that are trained are those of the largest gradients of the base.

PEFT is an extra, and imported here alone, once something is trained with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deltacompress.bench.tuning import rotations
from deltacompress.bench.tuning.methods import Method
from deltacompress.bench.tuning.stepping import Row, loss
from deltacompress.bench.tuning.training import batches
from deltacompress.checkpoints.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from deltacompress.errors import InputError, install_hint
from deltacompress.models.quiet import quiet

DENSITY = 0.02
"""Of RoSA: with rank 8 about the bytes of LoRA of rank 16."""
_BLOCK = 32  # of BOFT, at most
_MASK_BATCHES, _MASK_ROWS = 4, 16
_VALUES = "sparse_values"
_PREFIX = "base_model.model."


def require_peft() -> None:
    """Raises InputError: PEFT is not installed."""
    if find_spec("peft") is None:
        raise InputError(f"training adapters needs PEFT: {install_hint('adapters')}")


@contextmanager
def _peft() -> Iterator[Any]:
    """PEFT, without the extension that it would compile, and without its warnings, of calls that others mend."""
    with quiet():
        import peft
        from peft.tuners.boft import layer

        with rotations.without_extension(layer):
            yield peft


class Trained:
    """A model with an adapter of one method; `model` is what is trained. Draws from torch's own generator."""

    def __init__(self, model: Any, method: Method, rows: Sequence[Row]) -> None:
        """rows: of the training data, for RoSA's choice of entries."""
        self._method = method
        targets = _linears(model)
        self._sparse = _largest_gradients(model, targets, rows) if method.kind == "rosa" else {}
        self._targets = sorted({name.rpartition(".")[2] for name in targets})
        with _peft() as peft:
            self.model: Any = peft.get_peft_model(model, self._config(peft, method, targets))
        if method.kind == "boft":
            rotations.speed_up(self.model)
        self._values = {name: self._beside(name, places) for name, places in self._sparse.items()}

    def _config(self, peft: Any, method: Method, targets: dict[str, nn.Linear]) -> Any:
        if method.kind == "boft":
            block = math.gcd(_BLOCK, *(one.in_features for one in targets.values()))
            return peft.BOFTConfig(
                boft_block_size=block, boft_n_butterfly_factor=1, target_modules=self._targets, task_type="CAUSAL_LM"
            )
        return peft.LoraConfig(
            r=method.rank,
            lora_alpha=2 * method.rank,
            use_dora=method.kind == "dora",
            target_modules=self._targets,
            task_type="CAUSAL_LM",
        )

    def save(self, out: Path, dtype: torch.dtype) -> None:
        """Write config and tensors, in `dtype`, as PEFT and RoSA's fork name them."""
        with _peft():
            self.model.save_pretrained(out)
        found = {name: one.to(dtype).contiguous() for name, one in load_file(out / ADAPTER_WEIGHTS).items()}
        if self._values:
            named = {name.replace(".lora_", ".rosa_"): one for name, one in found.items()}
            found = {name: one for name, one in named.items() if not name.endswith(_VALUES)}
            for name, values in self._values.items():
                found |= self._rows(name, values.detach().cpu().to(dtype))
            rank = self._method.rank
            told = {"peft_type": "ROSA", "r": rank, "d": DENSITY, "lora_alpha": 2 * rank}
            (out / ADAPTER_CONFIG).write_text(json.dumps(told | {"target_modules": self._targets}, indent=2))
        save_file(found, out / ADAPTER_WEIGHTS, metadata={"format": "pt"})

    def _beside(self, name: str, places: Tensor) -> nn.Parameter:
        """Values that are added to a linear's weight [out, in] at flat `places`, which are apart."""
        module = self.model.get_submodule(_PREFIX + name)
        base, device = module.base_layer, module.weight.device
        values = nn.Parameter(torch.zeros(len(places), device=device))
        module.register_parameter(_VALUES, values)
        at = places.to(device)

        def forward(x: Tensor) -> Tensor:  # one product for both
            both = base.weight.flatten().scatter_add(0, at, values)
            return nn.functional.linear(x, both.view_as(base.weight), base.bias)

        base.forward = forward
        return values

    def _rows(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Compressed rows: offsets int32 [out + 1], columns in 16 bits, which overflow as in the fork."""
        module = self.model.get_submodule(_PREFIX + name)
        places, at = self._sparse[name], f"{_PREFIX}{name}.rosa_spa."
        counts = torch.bincount(places // module.in_features, minlength=module.out_features)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        columns = (places % module.in_features).to(torch.int16)
        return {f"{at}values": values, f"{at}row_offs": offsets.int(), f"{at}col_idx": columns}


def _linears(model: Any) -> dict[str, nn.Linear]:
    """All linears but the head, by name."""
    head = model.get_output_embeddings()
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head}


def _largest_gradients(model: Any, linears: dict[str, nn.Linear], rows: Sequence[Row]) -> dict[str, Tensor]:
    """Flat places, rising, of each linear's entries with the largest gradients over a few batches."""
    sums = {name: torch.zeros_like(one.weight) for name, one in linears.items()}
    ordered = batches(rows, _MASK_ROWS, 0)
    for _ in range(_MASK_BATCHES):
        model.zero_grad(set_to_none=True)
        loss(model, next(ordered)).backward()
        for name, one in linears.items():
            assert one.weight.grad is not None
            sums[name] += one.weight.grad.square()
    model.zero_grad(set_to_none=True)
    found = {}
    for name, squares in sums.items():
        largest = squares.flatten().topk(int(DENSITY * squares.numel())).indices
        found[name] = largest.sort().values.cpu()
    return found
