"""A rank that ends, fails or finds damage: who asks is told which one, nobody waits, and no process stays."""

from __future__ import annotations

import gc
import os
import shutil
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from adapters.written import write
from engine_calls import engine
from pairs import Pair, write_tokenizer
from ranked import Follower, forked
from runtime.graphed import as_on_a_gpu, pretend
from runtime.parallel.conftest import both_of
from runtime_cases import Served, random_ids
from tolerances import SPLIT
from torch import distributed

from deltacompress.errors import BackendError, ChecksumError, IntegrityError, InternalError
from deltacompress.processes import meeting, other
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine import scheduler
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.parallel.parts.variant import VariantPart
from deltacompress.runtime.parallel.ranks import crew
from deltacompress.runtime.parallel.ranks.hearing import RankLostError
from deltacompress.runtime.parallel.ranks.rank import Rank

ASKED = [(None, [5, 6, 7])]


def gone(started: list[Follower]) -> bool:
    """Whether all of them have ended, or soon have."""
    return all(one.wait() is not None for one in started)


def test_a_rank_that_is_killed_between_forwards(make_pair: Callable[..., Pair]) -> None:
    with both_of(make_pair("qwen2").base, 4) as both:
        both.many.logits(ASKED)
        both.others[1].kill()
        with pytest.raises(RankLostError, match=r"^rank 2 of 4 \(cpu\) was killed by signal 9; "):
            until_it_is_known(both.many)
        assert gone(both.others)
        with pytest.raises(RankLostError, match="rank 2 of 4"):
            both.many.complete(ASKED)
        with pytest.raises(RankLostError, match="rank 2 of 4"):
            both.many.model.others.check()


def until_it_is_known(runtime: Runtime) -> None:
    """Asking for nothing."""
    while True:
        runtime.model.others.check()


class Dies(Exception):
    """Raised in a follower."""


def breaks_at_the_third() -> None:
    """Rank 2 fails within its third forward."""
    original = Rank._forward

    def forward(self: Rank, plan: Any) -> None:
        self.__dict__["seen"] = self.__dict__.get("seen", 0) + 1
        if self.__dict__["seen"] == 3 and self._split.rank == 2:
            raise Dies("of something")
        original(self, plan)

    Rank._forward = forward  # type: ignore[method-assign]


def kills_itself() -> None:
    import os
    import signal

    original = Rank._forward

    def forward(self: Rank, plan: Any) -> None:
        if self._split.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, plan)

    Rank._forward = forward  # type: ignore[method-assign]


def counts_what_is_spared() -> None:
    def forward(self: Rank, plan: Any) -> None:
        raise Dies(f"{gc.get_freeze_count()} objects")

    Rank._forward = forward  # type: ignore[method-assign]


def test_collections_pass_over_what_a_rank_imported(make_pair: Callable[..., Pair]) -> None:
    with (
        both_of(make_pair("qwen2").base, 2, counts_what_is_spared) as both,
        pytest.raises(RankLostError, match=r"^rank 1 of 2 \(cpu\): Dies: [1-9]\d{5,} objects"),
    ):
        both.many.logits(ASKED)


@pytest.mark.parametrize("beside", [False, True])
def test_a_rank_that_fails_in_a_forward(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, steps: list[bool], *, beside: bool
) -> None:
    """The others wait for it in a sum, and are not left there; what it was is told, not that it was lost.

    beside: in a step whose tokens the host does not know.
    """
    monkeypatch.setattr(scheduler, "computes_beside", lambda _: beside)
    with both_of(make_pair("qwen2").base, 4, breaks_at_the_third) as both:
        with pytest.raises(RankLostError, match=r"^rank 2 of 4 \(cpu\): Dies: of something"):
            both.many.complete(ASKED, 16)
        assert steps[-1] == beside
        assert gone(both.others)


def test_a_rank_that_is_killed_in_a_forward(make_pair: Callable[..., Pair]) -> None:
    with both_of(make_pair("llama").base, 2, kills_itself) as both:
        with pytest.raises(RankLostError, match=r"^rank 1 of 2 \(cpu\) was killed by signal 9; "):
            both.many.logits(ASKED)
        assert gone(both.others)


@pytest.mark.parametrize("ends", ["closed", "killed"])
def test_captured_forwards_go_before_the_ranks_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """NCCL waits for them, and nobody can interrupt that."""
    there, leave, base = list[int](), meeting.Place.leave, write(tmp_path, "lora").base
    write_tokenizer(base)
    with as_on_a_gpu(), both_of(base, 2, pretend, merge_rounding=False) as both:
        both.many._cuda_graphs = True
        running, _ = engine(both.many)
        graphs = running._scheduler.graphs
        assert graphs is not None

        def left(place: meeting.Place) -> None:
            there.append(len(graphs.by_shape))
            leave(place)

        running.submit(Call("long", None, (5, 6, 7), 20, Sampling(ignore_eos=True)))
        for _ in range(10):
            running.step()
        assert graphs.by_shape
        monkeypatch.setattr(meeting.Place, "leave", left)
        if ends == "closed":
            both.many.close()
        else:
            both.others[0].kill()
            with pytest.raises(RankLostError, match="rank 1 of 2"):
                until_it_is_known(both.many)
            assert gone(both.others)
            while not there:  # a thread that hears of it is at it
                time.sleep(0.01)
        assert there[0] == 0


def does_not_come() -> None:
    from deltacompress.runtime.parallel.ranks import rank

    rank.read_layout = damaged  # type: ignore[assignment]


def does_not_load() -> None:
    from deltacompress.runtime.parallel.ranks import rank

    rank.load_base = damaged  # type: ignore[assignment]


def damaged(*_: object, **__: object) -> None:
    raise ChecksumError("is damaged", where="the base", way_out="get it again")


@pytest.mark.parametrize("tweak", [does_not_come, does_not_load])
def test_a_rank_that_cannot_load(make_pair: Callable[..., Pair], tweak: Callable[[], None]) -> None:
    with forked(tweak) as started:
        with pytest.raises(RankLostError, match=r"^rank 1 of 2 \(cpu\): the base: is damaged; get it again"):
            Runtime.from_base(make_pair("llama").base, tp=2)
        assert not any(one.is_alive for one in started)


def leaves_the_meeting() -> None:
    from deltacompress.runtime.parallel.ranks import rank

    rank.Group.joined = lambda *_: os._exit(7)  # type: ignore[method-assign]


def test_a_rank_that_leaves_in_the_meeting(make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are not waited for without end, and the next meeting of this process is one as any."""
    base = make_pair("llama").base
    with monkeypatch.context() as patch, forked(leaves_the_meeting) as started:
        patch.setattr(meeting, "_MEETING", timedelta(seconds=1))
        for _ in range(2):
            with pytest.raises(RankLostError, match=r"^rank 1 of 2 \(cpu\) ended with code 7; "):
                Runtime.from_base(base, tp=2)
        assert not any(one.is_alive for one in started)
    with both_of(base, 2) as both:
        assert both.many.logits(ASKED)[0].shape == (3, 96)


def test_the_first_rank_fails_in_a_forward(make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is told as it is; then the ranks are out of step, and that is told."""
    with both_of(make_pair("llama").base, 2) as both:
        layers = both.many.model.model.model.layers
        monkeypatch.setattr(layers[1], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            both.many.logits(ASKED)
        monkeypatch.undo()
        with pytest.raises(RankLostError, match=r"^the ranks are out of step, since a forward broke \(ZeroDivision"):
            both.many.logits(ASKED)
        assert gone(both.others)


def test_an_interrupt_once_a_forward_is_told(make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others compute it: what comes after must not be taken for its second half."""
    with both_of(make_pair("llama").base, 2) as both:
        crew: Any = both.many.model.others
        tell = crew._tell

        def told_and_interrupted(order: Any) -> None:
            tell(order)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(crew, "_tell", told_and_interrupted)
            with pytest.raises(KeyboardInterrupt):
                both.many.logits(ASKED)
        with pytest.raises(
            RankLostError, match=r"^the ranks are out of step, since a forward broke \(KeyboardInterrupt"
        ):
            both.many.logits([(None, [8, 9, 10])])
        assert gone(both.others)


def has_no_memory_at_first() -> None:
    original, found = DecoupledModel.install, iter([torch.OutOfMemoryError("for tables")])

    def install(self: DecoupledModel, *given: Any) -> None:
        if error := next(found, None):
            raise error
        original(self, *given)

    DecoupledModel.install = install  # type: ignore[method-assign]


def test_no_memory_of_another_rank(served: Callable[..., Served]) -> None:
    one = served("llama", "lossless")
    with both_of(one.pair.base, 2, has_no_memory_at_first) as both:
        with pytest.raises(BackendError, match=r"out of memory while a variant is loaded .*; lower budget_bytes"):
            both.many.load(one.artifact, "a")
        both.many.load(one.artifact, "a")
        requests = [("a", [5, 6]), (None, [5])]
        both.one.load(one.artifact, "a")
        for mine, whole in zip(both.many.logits(requests), both.one.logits(requests), strict=True):
            assert torch.allclose(mine, whole, atol=SPLIT.value)


def finds_damage() -> None:
    """The other rank, and not the first, the second time that it reads a variant."""
    original = Rank._read
    seen: list[int] = []

    def read(self: Rank, variant: Any) -> Any:
        seen.append(1)
        if len(seen) == 2:
            raise ChecksumError("differs", where="a part", way_out="copy it again")
        return original(self, variant)

    Rank._read = read  # type: ignore[method-assign]


def test_damage_that_another_rank_finds(served: Callable[..., Served]) -> None:
    """It is an error of that variant alone: no name or slot stays taken, and all else goes on."""
    one = served("llama", "lossless")
    with both_of(one.pair.base, 2, finds_damage) as both:
        both.many.load(one.artifact, "good")
        with pytest.raises(ChecksumError, match=r"^a part: differs; copy it again"):
            both.many.load(one.artifact, "bad")
        assert list(both.many.variants) == ["good"]
        both.many.load(one.artifact, "bad")
        requests = [(name, random_ids(5)) for name in ("good", "bad")]
        first, second = both.many.logits(requests)
        assert torch.allclose(first, second, atol=SPLIT.value)


def test_what_could_not_be_read_is_read_again(served: Callable[..., Served]) -> None:
    one = served("llama", "lossless")
    with both_of(one.pair.base, 2, finds_damage) as both:
        others, base = both.many.model.others, both.many.model.base
        for wrong in (False, True):
            variant = others.opened(one.artifact, base, None)
            read = others.prepare(variant)
            if wrong:
                with pytest.raises(ChecksumError, match=r"^a part: differs; copy it again"):
                    read()
                read = others.prepare(variant)
            read()


def test_damage_that_the_first_finds(served: Callable[..., Served], tmp_path: Path) -> None:
    one = served("llama", "lossless")
    copy = tmp_path / "copy"
    shutil.copytree(one.artifact, copy)
    shard = next(copy.glob("delta-*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(bytes(raw))
    with both_of(one.pair.base, 2) as both:
        with pytest.raises(IntegrityError):
            both.many.load(copy, "bad")
        both.many.load(one.artifact, "good")
        assert both.many.logits([("good", [5])])[0].shape == (1, 96)


def reads_when_it_may() -> None:
    original = Rank._read

    def read(self: Rank, variant: Any) -> Any:
        found = original(self, variant)
        while slow(variant.result().folder).exists():
            time.sleep(0.01)
        return found

    Rank._read = read  # type: ignore[method-assign]


def slow(folder: Path) -> Path:
    """While there is such a file, another rank is not done with reading a directory."""
    return folder.with_name(f"{folder.name}.slow")


def test_all_else_goes_on_while_another_rank_reads(served: Callable[..., Served], tmp_path: Path) -> None:
    copies = [tmp_path / name for name in "abcd"]
    for one in copies:
        shutil.copytree(served("llama", "lossless").artifact, one)
    with both_of(served("llama", "lossless").pair.base, 2, reads_when_it_may) as both:
        others, base = both.many.model.others, both.many.model.base
        slow(copies[0]).touch()
        opened = [others.opened(copies[0], base, None)]
        read = [others.prepare(opened[0])]  # before others can take its turn
        opened += [others.opened(one, base, None) for one in copies[1:]]
        read += [others.prepare(one) for one in (*opened[1:], opened[0])]  # of one variant twice, as of two names
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(one) for one in read]
            wanted = both.one.logits(ASKED)[0]
            assert torch.allclose(both.many.logits(ASKED)[0], wanted, atol=SPLIT.value)
            assert not any(one.done() for one in waiting)
            slow(copies[0]).unlink()
            assert [one.result(60) for one in waiting] == [None] * 5
        slow(copies[1]).touch()
        others.bring(0, opened[1])  # which was read, although others were to be after it
        read_again = others.prepare(opened[1])
        with ThreadPoolExecutor() as pool:
            again = pool.submit(read_again)
            both.others[0].kill()
            with pytest.raises(RankLostError, match="was killed by signal 9"):
                again.result(60)


def test_a_runtime_that_is_closed_while_another_rank_reads(served: Callable[..., Served], tmp_path: Path) -> None:
    shutil.copytree(served("llama", "lossless").artifact, copy := tmp_path / "copy")
    with both_of(served("llama", "lossless").pair.base, 2, reads_when_it_may) as both:
        others = both.many.model.others
        slow(copy).touch()
        variant = others.opened(copy, both.many.model.base, None)
        read = others.prepare(variant)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(read)
            both.many.close()
            with pytest.raises(RankLostError, match="the other ranks were ended; load the base again"):
                waiting.result(60)
        with pytest.raises(RankLostError, match="the other ranks were ended; load the base again"):
            read()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_a_variant_is_brought(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that comes later is not that of the next variant."""
    one = served("llama", "lossless")
    with both_of(one.pair.base, 2) as both:
        with monkeypatch.context() as patch:
            patch.setattr(both.many.model.others._hearing, "wait", interrupted)  # type: ignore[attr-defined]
            with pytest.raises(KeyboardInterrupt):
                both.many.load(one.artifact, "a")
        with pytest.raises(
            RankLostError, match=r"^the ranks are out of step, since a forward broke \(KeyboardInterrupt"
        ):
            both.many.load(one.artifact, "b")


def test_an_interrupt_before_a_variant_comes(served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds no slot that is empty."""
    one = served("llama", "lossless")
    with both_of(one.pair.base, 2) as both:
        both.load(one.artifact, "a")
        both.many.cache.evict("a")
        with monkeypatch.context() as patch:
            patch.setattr(both.many.model.others, "prepare", interrupted)
            with pytest.raises(KeyboardInterrupt):
                both.many.logits([("a", [5, 6])])
        (mine,), (whole,) = (each.logits([("a", [5, 6])]) for each in (both.many, both.one))
        assert torch.allclose(mine, whole, atol=SPLIT.value)


def opens_another_at_first() -> None:
    found = iter(["another"])
    original = VariantPart.identity.fget  # type: ignore[attr-defined]
    VariantPart.identity = property(lambda part: next(found, None) or original(part))  # type: ignore[assignment,misc]


def test_a_directory_that_another_rank_finds_changed(served: Callable[..., Served]) -> None:
    """Half of an answer would be of one artifact, half of the other."""
    one = served("llama", "lossless")
    with both_of(one.pair.base, 2, opens_another_at_first) as both:
        with pytest.raises(ChecksumError, match=r"became another between .* two ranks opened it; load it again"):
            both.many.load(one.artifact, "a")
        assert not both.many.variants
        both.many.load(one.artifact, "a")
        assert both.many.logits([("a", [5])])[0].shape == (1, 96)


def test_answers_out_of_turn(served: Callable[..., Served]) -> None:
    one = served("llama", "lossless")
    with both_of(one.pair.base, 2) as both:
        both.many.model.others._hearing.heard("loaded", True)  # type: ignore[attr-defined]
        with pytest.raises(InternalError, match="a rank answers 'loaded' where 'brought' was asked for"):
            both.many.load(one.artifact, "a")


def test_a_runtime_that_is_closed_or_dropped(make_pair: Callable[..., Pair]) -> None:
    base = make_pair("llama").base
    with forked() as started:
        runtime = Runtime.from_base(base, tp=2)
        runtime.close()
        runtime.close()
        assert not any(one.is_alive for one in started)
        with pytest.raises(RankLostError, match="the other ranks were ended; load the base again"):
            runtime.logits(ASKED)
        Runtime.from_base(base, tp=2).close()  # the group of the first is gone
        assert Runtime.from_base(base, tp=2).logits(ASKED)
        gc.collect()
        assert gone(started)
        later = Runtime.from_base(base, tp=2)
        runtime.close()  # whose group it is not
        assert later.logits(ASKED)
        later.close()


def is_on_no_network() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nope0"


def test_a_rank_that_cannot_meet_says_why(make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """What gloo says of an interface that is not there, not that memory was short."""
    monkeypatch.setattr(other, "LAST_WORDS", 0.2)
    monkeypatch.setattr(meeting, "_MEETING", timedelta(seconds=3))
    with forked(is_on_no_network) as started:
        with pytest.raises(RankLostError, match=r"^rank 1 of 2 \(cpu\) does not reach the others .* nope0") as caught:
            Runtime.from_base(make_pair("llama").base, tp=2)
        assert "memory" not in str(caught.value)
        assert not any(one.is_alive for one in started)


def tells_nonsense() -> None:
    from deltacompress.runtime.parallel.ranks import rank

    def joined(*_: Any) -> None:
        os.write(told, b"no message at all\n")
        time.sleep(60)

    told = os.dup(1)
    rank.Group.joined = joined  # type: ignore[method-assign,assignment]


def test_a_line_that_is_no_message(make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_MEETING", timedelta(seconds=1))
    with forked(tells_nonsense) as started:
        told = r"^rank 1 of 2 \(cpu\) told what is no message .*JSONDecodeError.*: no message at all"
        with pytest.raises(RankLostError, match=told):
            Runtime.from_base(make_pair("llama").base, tp=2)
        assert not any(one.is_alive for one in started)


def test_an_order_that_is_none(make_pair: Callable[..., Pair]) -> None:
    """What the thread that receives orders raises is told, too."""
    with both_of(make_pair("llama").base, 2) as both:
        crew: Any = both.many.model.others
        crew._others[0].tell(b"?" * 64)
        with pytest.raises(RankLostError, match=r"^rank 1 of 2 \(cpu\): .* begins no message of the first rank"):
            until_it_is_known(both.many)


def interrupted_once_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test Ctrl-C comes when the group is there, and nobody knows it yet."""
    joined = crew.Group.joined

    def then_interrupted(*given: Any) -> Any:
        joined(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(crew.Group, "joined", then_interrupted)


def test_an_interrupt_once_the_ranks_have_met(make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_pair("llama").base
    with monkeypatch.context() as patch, forked() as started:
        interrupted_once_met(patch)
        with pytest.raises(KeyboardInterrupt):
            Runtime.from_base(base, tp=2)
        assert not any(one.is_alive for one in started)
    assert not distributed.is_initialized()
    with both_of(base, 2) as both:
        assert both.many.logits(ASKED)[0].shape == (3, 96)


def test_two_threads_that_load(make_pair: Callable[..., Pair]) -> None:
    """One does, and the other is told that it cannot."""
    base, at_once = make_pair("llama").base, Barrier(2)

    def load() -> Runtime | BackendError:
        at_once.wait(10)
        try:
            return Runtime.from_base(base, tp=2)
        except BackendError as error:
            return error

    with forked() as started, ThreadPoolExecutor(2) as pool:
        found = [one.result(60) for one in [pool.submit(load), pool.submit(load)]]
        (runtime,) = (one for one in found if isinstance(one, Runtime))
        (refused,) = (one for one in found if isinstance(one, BackendError))
        assert str(refused).startswith("tp: this process ")
        assert "already; give 1, or do it in a process of its own" in str(refused)
        assert runtime.logits(ASKED)[0].shape == (3, 96)
        runtime.close()
        assert len(started) == 1


def test_a_runtime_that_was_dropped_in_a_cycle(make_pair: Callable[..., Pair]) -> None:
    """The next one is loaded all the same."""
    base = make_pair("llama").base
    with forked():
        gc.disable()
        try:
            cycle: list[Any] = [Runtime.from_base(base, tp=2)]
            cycle.append(cycle)
            del cycle
            Runtime.from_base(base, tp=2).close()
        finally:
            gc.enable()


def test_whoever_collects_garbage_does_not_wait(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a process that takes its time to end."""
    may_end, wait = Event(), Follower.wait

    def slowly(self: Follower) -> int:
        may_end.wait(30)
        return wait(self)

    with forked() as started, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(Follower, "wait", slowly)
        assert Runtime.from_base(make_pair("llama").base, tp=2).describe()
        collected = pool.submit(gc.collect)
        try:
            collected.result(10)
        finally:
            may_end.set()
        assert gone(started)


def test_a_runtime_that_is_closed_while_a_variant_is_brought(served: Callable[..., Served], tmp_path: Path) -> None:
    """That nobody is left to answer is no answer of all."""
    shutil.copytree(served("llama", "lossless").artifact, copy := tmp_path / "copy")
    with both_of(served("llama", "lossless").pair.base, 2, reads_when_it_may) as both:
        others = both.many.model.others
        slow(copy).touch()
        variant = others.opened(copy, both.many.model.base, None)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(others.bring, 0, variant)
            time.sleep(0.2)
            both.many.close()
            with pytest.raises(RankLostError, match="the other ranks were ended; load the base again"):
                waiting.result(60)


def test_each_time_it_is_asked_an_error_is_one_by_itself(make_pair: Callable[..., Pair]) -> None:
    """A server that asks again and again would have a traceback without end."""
    with both_of(make_pair("llama").base, 2) as both:
        both.others[0].kill()
        with pytest.raises(RankLostError, match="was killed by signal 9"):
            until_it_is_known(both.many)
        depths = set[int]()
        for _ in range(3):
            with pytest.raises(RankLostError) as caught:
                both.many.model.others.check()
            depths.add(len(list(traceback.walk_tb(caught.value.__traceback__))))
        assert len(depths) == 1
