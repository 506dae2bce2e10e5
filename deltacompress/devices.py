"""Where tensors are computed: what a device's name means, whether a GPU is here, what it is called, what is free on it.

No torch until one of these is called: the command line names devices before it waits for that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from deltacompress.errors import BackendError, InputError, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DeviceName = Literal["auto", "cpu", "cuda"]
"""What can be given on the command line; auto is a GPU where there is one."""
NAMES: tuple[str, ...] = get_args(DeviceName)
_CGROUP = Path("/sys/fs/cgroup")
_EQUAL = 0.02
"""By how much the memory of equal cards may differ: a driver keeps some of it."""


def has_gpu() -> bool:
    """Whether torch can compute on a GPU here."""
    import torch

    return torch.cuda.is_available()


def has_driver() -> bool:
    """Whether there may be a GPU, as far as can be told without torch: NVIDIA's driver is here, or AMD's."""
    import ctypes

    if sys.platform != "linux" or Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # as torch does
    except OSError:
        return False
    return True


def check_driver(*names: str) -> None:
    """None of these asks for a GPU where there certainly is none: torch itself knows more, and is asked later.

    Raises:
        BackendError: one does.
    """
    if "cuda" in names and not has_driver():
        raise _no_gpu()


def named_device(name: str) -> torch.device:
    """What "auto", "cpu" or "cuda" means here.

    Raises:
        BackendError: another one; "cuda", and torch sees no GPU.
    """
    import torch

    if name not in NAMES:
        raise BackendError(
            "there is none of that name", where=f"{option('device')} {name}", way_out="give auto, cpu or cuda"
        )
    if name == "cuda" and not has_gpu():
        raise _no_gpu()
    return torch.device(_chosen(name))


def device_numbers(given: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """The numbers in "0,1", or those of a sequence, each of them once.

    Raises:
        InputError: there is none, one is no number, or there twice.
    """
    if given is None:
        return None
    where = f"{option('devices')} {given if isinstance(given, str) else list(given)}"
    way_out = "give numbers of GPUs such as 0,1"
    words = [one.strip() for one in given.split(",")] if isinstance(given, str) else [str(one) for one in given]
    if not any(words):
        raise InputError("names no GPU", where=where, way_out=way_out)
    if wrong := [one for one in words if not (one.isascii() and one.isdigit())]:
        raise InputError(f"{wrong[0]!r} is no number of a GPU", where=where, way_out=way_out)
    numbers = tuple(int(one) for one in words)
    if twice := [one for one in numbers if numbers.count(one) > 1]:
        raise InputError(f"GPU {twice[0]} is there twice", where=where, way_out="give each once")
    return numbers


def check_together(numbers: Sequence[int] | None, device: str) -> None:
    """That `devices` and `device` do not contradict each other; raises InputError."""
    if numbers is not None and device == "cpu":
        told = f"names GPUs, while {option('device')} is cpu"
        raise InputError(told, where=option("devices"), way_out="leave out one of the two")


def chosen_devices(numbers: Sequence[int] | None, device: str) -> tuple[torch.device, ...]:
    """Where a run computes, a device for each of its processes; the one that `device` names where no numbers are given.

    Equal cards: equal shares are handed out, and each factorizes the same Hessian, to the same bits.

    Raises:
        InputError: `device` is cpu. BackendError: a GPU is not there, or they are not equal.
    """
    check_together(numbers, device)
    if numbers is None:
        return (named_device(device),)
    import torch

    where = f"{option('devices')} {','.join(map(str, numbers))}"
    there = torch.cuda.device_count() if has_gpu() else 0
    if missing := [one for one in numbers if one >= there]:
        known = f"torch sees {there} here, from 0 to {there - 1}" if there else "torch sees none here"
        raise BackendError(
            f"there is no GPU {missing[0]}: {known}", where=where, way_out="give others" if there else "leave it out"
        )
    cards = [torch.cuda.get_device_properties(one) for one in numbers]
    for number, card in zip(numbers, cards, strict=True):
        near = abs(card.total_memory - cards[0].total_memory) <= _EQUAL * cards[0].total_memory
        if card.name != cards[0].name or not near:
            told = (
                f"GPU {number} is {card.name} with {card.total_memory / 2**30:.0f} GiB, GPU {numbers[0]} is "
                f"{cards[0].name} with {cards[0].total_memory / 2**30:.0f} GiB: a run is split over equal ones"
            )
            raise BackendError(told, where=where, way_out="give equal ones")
    return tuple(torch.device("cuda", one) for one in numbers)


def resolve_device(device: str | torch.device) -> torch.device:
    """Any device that torch knows ("cuda:1", say), where "auto" is a GPU if there is one.

    Raises:
        BackendError: no such device here.
    """
    import torch

    name = _chosen(device) if isinstance(device, str) else device
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise BackendError(
            "torch knows no such device", where=f"device {name}", way_out="use cpu, cuda or auto"
        ) from error
    if found.type == "cuda" and not has_gpu():
        raise BackendError("device cuda: torch sees no GPU here", way_out="use device cpu")
    return found


def gpu_name(device: torch.device) -> str | None:
    """What the maker calls a GPU; None of another device."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """What a table of measurements calls a device."""
    return gpu_name(device) or f"CPU, {os.cpu_count()} cores"


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """In this block a GPU is the one that is meant where none is named."""
    import torch

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def map_in_pages() -> None:
    """Have PyTorch map a GPU's memory in pages: large tensors find room in the gaps that small ones left, and back.

    Only before the first tensor on a GPU; where the environment says how to allocate, that stays.
    """
    if not any(name in os.environ for name in _ALLOCATING):
        os.environ[_ALLOCATING[0]] = "expandable_segments:True"


_ALLOCATING = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
_limits: dict[int, int] = {}  # by index


@contextmanager
def limited_memory(device: torch.device, nbytes: int | None) -> Iterator[None]:
    """In this block tensors take at most so many bytes of a GPU's memory; torch raises OutOfMemoryError beyond.

    What the driver and its libraries take besides is not counted (half a gigabyte, about).
    """
    import torch

    if nbytes is None or device.type != "cuda":
        yield
        return
    named: int | None = device.index
    index = torch.cuda.current_device() if named is None else named
    whole = torch.cuda.mem_get_info(device)[1]
    torch.cuda.empty_cache()  # what is kept for the next tensors counts as taken
    torch.cuda.set_per_process_memory_fraction(min(nbytes / whole, 1.0), index)
    _limits[index] = nbytes
    try:
        yield
    finally:
        del _limits[index]
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that can still be had: free, or kept by torch for the next tensors, within `limited_memory`."""
    import torch

    taken = torch.cuda.memory_allocated(device)
    return unreserved_bytes(device) + torch.cuda.memory_reserved(device) - taken


def unreserved_bytes(device: torch.device) -> int:
    """Memory of a GPU that can still be had beside what torch keeps for the next tensors, within `limited_memory`."""
    import torch

    free, whole = torch.cuda.mem_get_info(device)
    limit = next((limit for index, limit in _limits.items() if device.index in (None, index)), whole)
    return min(free, limit - torch.cuda.memory_reserved(device))


@lru_cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream of a GPU for all that is captured there: cuBLAS keeps memory of its own for each."""
    import torch

    return torch.cuda.Stream(device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of host memory on a device; nobody waits for the copy but what the same stream does next."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def fetched(tensor: Tensor) -> Tensor:
    """A tensor in host memory, once its device has come to it."""
    return fetching(tensor)()


def fetching(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to host memory; what is returned waits for that, not for what is launched meanwhile.

    From a GPU through pinned memory: the driver would wait with a copy to any other, and what other threads launch
    meanwhile would wait with it (a variant that came while others decoded took five times as long).
    """
    if tensor.device.type != "cuda":
        return lambda: tensor
    import torch

    found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    found.copy_(tensor, non_blocking=True)
    event = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> Tensor:
        event.synchronize()
        return found

    return wait


def _chosen(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if has_gpu() else "cpu"


def _no_gpu() -> BackendError:
    return BackendError("torch sees no CUDA GPU here", where=f"{option('device')} cuda", way_out="give cpu")


def free_host_bytes() -> int:
    """Bytes of host memory that can still be had, by a container's limit too."""
    import psutil

    free: int = psutil.virtual_memory().available
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        told = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        files = int(told["inactive_file"])  # read, and dropped when there is need of room
    except (OSError, ValueError, KeyError):  # no such limit: another system, or "max"
        return free
    return min(free, limit - used + files)
