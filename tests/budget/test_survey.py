"""What KL a choice is predicted, from what a walk found: against the formulas, of sums made up here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from deltacompress.budget import parts, survey
from deltacompress.budget.measuring import shares
from deltacompress.budget.measuring.ladder import Step
from deltacompress.budget.measuring.measured import Measured, Walked
from deltacompress.budget.measuring.probes import Probe
from deltacompress.budget.parts import survey_of
from deltacompress.budget.rungs import COARSE, COUNTED_REFERENCE, COUNTED_WIDEST, DRAWN, REFERENCE, WIDEST, Rung
from deltacompress.budget.survey import Survey

FINE = "4 bits, steps of 0.5"
LOSSES = {FINE: 0.02, REFERENCE.name: 0.2, COARSE.name: 0.4, WIDEST.name: 0.8}
TOKENS = 100
"""To be written."""


def probe(kl: float) -> Probe:
    """Of ten records that say the same."""
    return Probe([], kl=[kl * TOKENS, 0.0], records=torch.full((10,), kl * TOKENS / 10, dtype=torch.float64))


def linear(number: int, kl: float) -> Measured:
    steps = [Step(name, int(100 / loss), loss) for name, loss in LOSSES.items()]
    return Measured((f"l{number}",), "linear", steps, REFERENCE.name, probe(kl))


def embedding(kl: float, widest: float) -> Measured:
    steps = [
        Step(COUNTED_REFERENCE.name, 20, 0.2),
        Step(COUNTED_WIDEST.name, 10, 0.4),
        Step("8 bits, rounded", 50, 0.1),
    ]
    return Measured(("e",), "embedding", steps, COUNTED_REFERENCE.name, probe(kl), (COUNTED_WIDEST.name, probe(widest)))


@pytest.fixture(autouse=True)
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured of whole models is believed as it is: how far it is has tests of its own."""

    def measured(_: Rung, told: float, of_rung: torch.Tensor, of_reference: torch.Tensor) -> float:
        return float(of_rung.sum() / of_reference.sum()) / told if told else 1.0

    monkeypatch.setattr(parts, "excess", measured)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing makes up for errors of linears either, so that whole models are predicted what they were measured."""
    monkeypatch.setattr(parts, "AFTER_OBS", 1.0)


def surveyed(groups: list[Measured], knee: float, coarse: float, widest: float, drawn: float = 0.0) -> Survey:
    measured = {REFERENCE: knee, COARSE: coarse, WIDEST: widest, DRAWN: drawn}
    whole = {rung.name: probe(kl) for rung, kl in measured.items()}
    return survey_of(Walked(groups, whole, (TOKENS, 0), 0.1), finetuned_bytes=10**6, fixed_bytes=0)


def picks(survey: Survey, rung: str, of_embedding: str = COUNTED_REFERENCE.name) -> list[int]:
    wanted = {"linear": rung, "embedding": of_embedding}
    return [[one.rung for one in group.options].index(wanted[group.kind]) for group in survey.groups]


def test_the_parts_of_references_add_up_and_go_with_the_loss() -> None:
    found = surveyed([linear(0, 1.0), linear(1, 3.0)], knee=2.0, coarse=4.0, widest=8.0)
    each = {(group.names[0], one.rung): one.part for group in found.groups for one in group.options}
    assert each["l0", REFERENCE.name] == pytest.approx(0.5)
    assert each["l1", REFERENCE.name] == pytest.approx(1.5)
    assert each["l1", FINE] == pytest.approx(0.15)
    assert found.power == pytest.approx(1.0)


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("with_embedding", [False, True])
def test_the_three_models_that_were_measured_are_predicted(with_embedding: bool) -> None:
    """But for the factor that real compressions have."""
    groups = [linear(0, 1.0), linear(1, 3.0)] + [embedding(1.0, 5.0)] * with_embedding
    found = surveyed(groups, knee=2.0, coarse=6.0, widest=60.0)
    for rung, kl in ((REFERENCE, 2.0), (COARSE, 6.0), (WIDEST, 60.0)):
        assert found.kl(picks(found, rung.name)) / found.scale == pytest.approx(kl), rung.name


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("with_embedding", [False, True])
@pytest.mark.parametrize(("kl", "coarse", "widest"), [(1.6, 6.0, 60.0), (6.0, 7.0, 60.0), (30.0, 30.0, 300.0)])
def test_the_model_of_signs_by_lot_is_predicted_what_it_was_measured(
    kl: float, coarse: float, widest: float, with_embedding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below and above the reference, but for what fisher does to steps; and so are those of steps."""
    groups = [linear(0, 1.0), linear(1, 3.0)] + [embedding(1.0, 5.0)] * with_embedding
    for one in groups[:2]:
        one.steps.extend([Step(DRAWN.name, 30, 0.5), Step("signs, 1 of 4 drawn", 20, 0.7)])
    counted = surveyed(groups, knee=2.0, coarse=coarse, widest=widest, drawn=kl)
    monkeypatch.setattr(parts, "_FISHER", 1.0)
    found = surveyed(groups, knee=2.0, coarse=coarse, widest=widest, drawn=kl)
    for one, other in zip(found.groups[:2], counted.groups[:2], strict=True):
        assert [option.part for option in one.options[-2:]] == pytest.approx(
            [0.7 * option.part for option in other.options[-2:]]
        )
    for rung, wanted in ((REFERENCE, 2.0), (COARSE, coarse), (WIDEST, widest), (DRAWN, kl)):
        assert found.kl(picks(found, rung.name)) / found.scale == pytest.approx(wanted), rung.name
    each = {one.rung: one.part for one in found.groups[0].options}
    assert each["signs, 1 of 4 drawn"] / each[DRAWN.name] == pytest.approx(0.7 / 0.5)


def test_the_power_is_that_of_errors_that_differ_from_answer_to_answer() -> None:
    """Squares of drawn rungs tell 2.5 times the reference, their KL is 3 times; coarse steps cost more than that."""
    one = linear(0, 1.0)
    one.steps.append(Step(DRAWN.name, 30, 0.5))
    found = surveyed([one], knee=2.0, coarse=7.0, widest=60.0, drawn=6.0)
    assert found.power == pytest.approx(math.log(3) / math.log(2.5))
    each = {option.rung: option.part for option in found.groups[0].options}
    assert each[DRAWN.name] == pytest.approx(2.0 * 2.5 / parts._FISHER)
    assert each[COARSE.name] == pytest.approx(2.0 * 3.5 ** (1 / found.power))
    assert each[COARSE.name] > 2.0 * 0.4 / 0.2


@pytest.mark.parametrize(("drawn", "power", "part"), [(4.0, 1.0, 2.0), (200.0, 4.0, 100**0.25)])
def test_the_power_is_one_at_least_and_four_at_most(drawn: float, power: float, part: float) -> None:
    """Squares tell 2.5 times the reference; twice, and a hundred times are measured."""
    one = linear(0, 1.0)
    one.steps.append(Step(DRAWN.name, 30, 0.5))
    found = surveyed([one], knee=2.0, coarse=5.0, widest=9.0, drawn=drawn)
    assert found.power == power
    assert found.groups[0].options[-1].part == pytest.approx(2.0 * part / 0.7)


def test_signs_by_lot_cost_a_hundredth_of_their_loss_at_least() -> None:
    """Their model lost less than the embedding alone is said to."""
    one = linear(0, 1.0)
    one.steps.append(Step(DRAWN.name, 30, 0.5))
    found = surveyed([one, embedding(1.0, 5.0)], knee=2.0, coarse=6.0, widest=9.0, drawn=0.5)
    assert found.groups[0].options[-1].part == pytest.approx(0.01 * 2.5 / 0.7)


@pytest.mark.usefixtures("alike")
def test_a_group_that_is_only_rounded_is_in_whole_models_as_that() -> None:
    steps = [Step("2 bits, rounded", 30, 0.3), Step("8 bits, rounded", 90, 0.1)]
    rounded = Measured(("r",), "linear", steps, "2 bits, rounded", probe(3.0))
    found = surveyed([linear(0, 1.0), rounded], knee=2.0, coarse=6.0, widest=60.0)
    assert [one.part for one in found.groups[1].options] == pytest.approx([1.5, 0.5])
    assert found.groups[0].options[2].part == pytest.approx(6.0 - 1.5)
    assert found.groups[0].options[3].part == pytest.approx(60.0 - 1.5)
    assert found.reference == pytest.approx(2.0)


def test_between_the_coarse_and_the_widest_it_grows_by_the_logarithm() -> None:
    one = linear(0, 1.0)
    one.steps.append(Step("2 bits, steps of 5.0", 50, math.sqrt(0.4 * 0.8)))
    found = surveyed([one], knee=1.0, coarse=2.0, widest=12.0)
    each = {option.rung: option.part for option in found.groups[0].options}
    assert each[WIDEST.name] == pytest.approx(12.0)
    assert each["2 bits, steps of 5.0"] == pytest.approx(math.sqrt(8.0) * math.sqrt(3.0))
    assert each[COARSE.name] == pytest.approx(2.0)


def test_what_was_measured_to_be_less_is_not_believed() -> None:
    found = surveyed([linear(0, 1.0)], knee=1.0, coarse=2.0, widest=3.0)
    assert found.groups[0].options[-1].part == pytest.approx(4.0)


@pytest.mark.usefixtures("alike")
def test_an_embedding_costs_as_two_probes_say() -> None:
    found = surveyed([linear(0, 1.0), embedding(1.0, 8.0)], knee=2.0, coarse=3.0, widest=5.0)
    each = {one.rung: one.part for one in found.groups[1].options}
    assert each[COUNTED_REFERENCE.name] == pytest.approx(1.0)
    assert each[COUNTED_WIDEST.name] == pytest.approx(8.0)
    assert each["8 bits, rounded"] == pytest.approx(0.5)  # below the reference KL goes with the loss
    mild = surveyed([linear(0, 1.0), embedding(1.0, 1.1)], knee=2.0, coarse=3.0, widest=5.0)
    assert mild.groups[1].options[1].part == pytest.approx(2.0)  # never less than the loss says


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize(("widest", "times"), [(8.0, 8.0), (0.5, 2.0), (0.0, 2.0), (-1.0, 2.0), (100.0, 16.0)])
def test_a_tied_embedding_costs_as_its_two_probes_say_too(widest: float, times: float) -> None:
    """Each with its head: twice the loss, 8 times the KL, but within the powers 1 to 4."""
    tied = embedding(1.0, widest)
    for one in tied.probes:
        one.head = torch.zeros(1)
    found = surveyed([linear(0, 1.0), tied], knee=2.0, coarse=3.0, widest=5.0)
    each = {one.rung: one.part for one in found.groups[1].options}
    assert each[COUNTED_WIDEST.name] / each[COUNTED_REFERENCE.name] == pytest.approx(times)


def test_a_group_that_seems_to_cost_nothing_has_a_tenth_of_an_even_share() -> None:
    found = surveyed([linear(0, 4.0), linear(1, -1.0)], knee=3.0, coarse=6.0, widest=12.0)
    reference = [one.options[1].part for one in found.groups]
    assert sum(reference) == pytest.approx(3.0)
    assert reference[1] / reference[0] == pytest.approx(0.05)


def test_a_group_that_loses_no_more_in_wider_steps_is_left_as_it_is() -> None:
    odd = linear(1, 3.0)
    odd.steps[2:] = [Step(COARSE.name, 20, 0.9), Step(WIDEST.name, 10, 0.8)]
    found = surveyed([linear(0, 1.0), odd], knee=2.0, coarse=20.0, widest=60.0)
    assert found.kl(picks(found, WIDEST.name)) / found.scale == pytest.approx(60.0)
    assert found.groups[1].options[3].part < found.groups[1].options[2].part


def test_a_reference_that_loses_nothing() -> None:
    one = linear(0, 1.0)
    one.steps[:] = [
        Step(step.rung, step.bytes, 0.0 if step.rung == REFERENCE.name else step.loss) for step in one.steps
    ]
    assert [option.part for option in surveyed([one], knee=1.0, coarse=2.0, widest=3.0).groups[0].options] == [0.0] * 4


def test_of_answers_that_do_not_change_nothing_is_predicted() -> None:
    found = surveyed([linear(0, 0.0), embedding(0.0, 0.0)], knee=0.0, coarse=0.0, widest=0.0)
    assert found.kl(picks(found, WIDEST.name)) == 0


def test_a_whole_model_that_rounding_made_less_than_nothing_rewards_no_loss() -> None:
    """Or the choice of the least sum would be that of the widest steps."""
    found = surveyed([linear(0, 1.0), embedding(1.0, 5.0)], knee=-1.0, coarse=2.0, widest=3.0, drawn=1.0)
    assert {one.part for group in found.groups for one in group.options} == {0.0}
    assert found.kl(picks(found, WIDEST.name)) == 0


def shares_of(kl: dict[str, tuple[float, float]]) -> list[float]:
    """Of the KL of all references; in tokens to be written, and as many others."""
    groups = [linear(k, one[0]) for k, one in enumerate(kl.values())]
    for one, (name, (_, others)) in zip(groups, kl.items(), strict=True):
        one.probe.kl[1] = others * TOKENS
        one.probe.head = torch.zeros(1) if name == "head" else None
    share = shares.shares_of(groups, TOKENS)
    return [share(one.probe) for one in groups]


def test_what_other_tokens_say_steadies_all_but_the_head() -> None:
    """100 tokens to be written and 100 others, which weigh as 256, and an even share, of the head, as 32."""
    trust, of_head = 100 / 356, 100 / 132 / 4 + 32 / 132 / 3
    found = shares_of({"a": (1.0, 3.0), "b": (2.0, 1.0), "head": (1.0, 50.0)})
    expected = [trust / 3 + (1 - trust) * 3 / 4, trust * 2 / 3 + (1 - trust) / 4]
    expected = [(1 - of_head) * one for one in expected] + [of_head]
    assert sum(expected) == pytest.approx(1)
    assert found == pytest.approx(expected)


def test_what_rounding_made_less_than_nothing_is_nothing() -> None:
    of_head = 100 / 132 + 32 / 132 / 3
    found = shares_of({"a": (-4.0, 3.0), "b": (0.0, 1.0), "head": (5.0, 50.0)})
    trust = 100 / 356
    least = 0.1 / 3
    expected = [(1 - of_head) * (1 - trust) * one / 4 for one in (3, 1)]
    assert expected[1] < least < expected[0]
    expected = [expected[0], least, of_head]
    assert found == pytest.approx([one / sum(expected) for one in expected])


def test_where_other_tokens_say_nothing_the_written_ones_say_it_all_but_of_the_head() -> None:
    """None of what others weigh is lost to the head; less than nothing is nothing there, too."""
    of_head = 100 / 132 / 4 + 32 / 132 / 3
    for others in (0.0, -7.0):
        found = shares_of({"a": (1.0, others), "b": (2.0, 0.0), "head": (1.0, 50.0)})
        assert found == pytest.approx([(1 - of_head) / 3, (1 - of_head) * 2 / 3, of_head])
    trust = 100 / 356
    found = shares_of({"a": (2.0, -2.0), "b": (2.0, 1.0), "c": (0.0, 3.0)})
    expected = [trust / 2, trust / 2 + (1 - trust) / 4, (1 - trust) * 3 / 4]
    assert found == pytest.approx(expected)


def test_where_nothing_else_is_told_a_group_has_what_the_written_tokens_say() -> None:
    groups = [linear(0, 1.0), linear(1, 3.0)]
    share = shares.shares_of(groups, TOKENS)
    assert [share(one.probe) for one in groups] == pytest.approx([0.25, 0.75])


def test_what_nothing_makes_up_for_counts_in_full() -> None:
    """Compressed, the parts of linears are AFTER_OBS of themselves; those of embedding and head all of it."""
    head = linear(1, 1.0)
    head = replace(head, kind="head", probe=replace(head.probe, head=torch.zeros(1)))
    found = surveyed([linear(0, 2.0), head, embedding(1.0, 5.0)], knee=4.0, coarse=8.0, widest=16.0)
    shared = {
        group.kind: group.options[[one.rung for one in group.options].index(name)].part
        for group, name in zip(found.groups, (REFERENCE.name, REFERENCE.name, COUNTED_REFERENCE.name), strict=True)
    }
    share = shares.shares_of([linear(0, 2.0), head, embedding(1.0, 5.0)], TOKENS)
    for kind, one in (("linear", linear(0, 2.0)), ("head", head), ("embedding", embedding(1.0, 5.0))):
        full = 4.0 * share(one.probe)
        assert found.scale * shared[kind] == pytest.approx(full * (survey.AFTER_OBS if kind == "linear" else 1.0))
    assert found.reference == pytest.approx(sum(shared.values()))
    assert found.scale == 0.3


def test_whole_models_are_predicted_what_is_believed_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times what losses tell, whatever was measured."""
    asked = list[tuple[str, float, float, float]]()

    def usual(rung: Rung, told: float, of_rung: torch.Tensor, of_reference: torch.Tensor) -> float:
        asked.append((rung.name, told, float(of_rung.sum()), float(of_reference.sum())))
        return 3.0

    monkeypatch.setattr(parts, "excess", usual)
    found = surveyed([linear(0, 1.0), linear(1, 3.0)], knee=2.0, coarse=5.0, widest=60.0, drawn=7.0)
    assert [name for name, *_ in asked] == [COARSE.name, WIDEST.name, DRAWN.name]
    assert [told for _, told, *_ in asked] == pytest.approx([2.0, 4.0, 1.0])
    assert [kl / TOKENS for *_, kl, _ in asked] == pytest.approx([5.0, 60.0, 7.0])
    assert [kl / TOKENS for *_, kl in asked] == pytest.approx([2.0, 2.0, 2.0])
    assert found.kl(picks(found, COARSE.name)) / found.scale == pytest.approx(2.0 * 2.0 * 3.0)
    assert found.kl(picks(found, WIDEST.name)) / found.scale == pytest.approx(2.0 * 4.0 * 3.0)


def test_what_a_trial_lacks_is_worth_most_in_steps() -> None:
    """Each part of what a trial loses shrinks by its own factor: fisher is for linears that are solved in steps."""
    head = replace(linear(3, 1.0), kind="head", probe=replace(probe(1.0), head=torch.zeros(1)))
    drawn = linear(1, 1.0)
    drawn.steps.append(Step(DRAWN.name, 30, 0.5))
    found = surveyed([linear(0, 1.0), drawn, head, embedding(1.0, 1.0)], knee=4.0, coarse=8.0, widest=16.0)
    chosen = [1, 4, 1, 0]
    now = [group.options[pick].part for group, pick in zip(found.groups, chosen, strict=True)]
    left = [survey._AFTER_TRIAL_WITH_FISHER, *[survey._AFTER_TRIAL] * 3]
    tried = [part / one for part, one in zip(now, left, strict=True)]
    assert found.kl_after_trial(chosen) == pytest.approx(sum(now) / sum(tried))
    assert surveyed([linear(0, 1.0)], 1.0, 2.0, 4.0).kl_after_trial([1]) == pytest.approx(0.55)
    assert surveyed([drawn], 1.0, 2.0, 4.0).kl_after_trial([4]) == pytest.approx(0.9)
    assert surveyed([linear(0, 0.0)], 0.0, 0.0, 0.0).kl_after_trial([1]) == 0.9


def test_bytes_are_those_that_fisher_leaves() -> None:
    """Of linears that are solved with it: neither of the head, nor of experts, nor of signs by lot, nor of what the
    manifest holds.
    """
    plain = linear(0, 1.0)
    plain.steps.append(Step(DRAWN.name, 3000, 0.5))
    plain.steps[3] = replace(plain.steps[3], bytes=2000, fixed=500)
    of_head = replace(plain, kind="head", probe=replace(probe(1.0), head=torch.zeros(1)))
    found = surveyed([plain, of_head, replace(plain, experts=True)], knee=4.0, coarse=8.0, widest=16.0)
    assert [group.options[3].bytes for group in found.groups] == [500 + 1341, 2000, 2000]
    assert [group.options[4].bytes for group in found.groups] == [3000] * 3


def test_a_trial_has_no_fisher_that_would_leave_fewer_bytes() -> None:
    """It took 2200, 900 and 300 bytes, and 600 of all else: 0.894 of three quarters of the widest steps will be left,
    and all of signs and of the head.
    """
    steps, drawn = linear(0, 1.0), linear(1, 1.0)
    steps.steps[3] = replace(steps.steps[3], bytes=2000, fixed=500)
    drawn.steps.append(Step(DRAWN.name, 1000, 0.5))
    head = replace(linear(2, 1.0), kind="head", probe=replace(probe(1.0), head=torch.zeros(1)))
    found = surveyed([steps, drawn, head], knee=3.0, coarse=6.0, widest=12.0)
    after = found.after_trial([3, 4, 3], 4000, [2200, 900, 300], 0.5)
    left = round(2200 * (500 + 1500 * 0.894) / 2000)
    assert [after.groups[k].options[pick].bytes for k, pick in ((0, 3), (1, 4), (2, 3))] == [left, 900, 300]
    assert after.bytes([3, 4, 3]) == 600 + left + 900 + 300
    assert after.groups[0].options[0].bytes == round(found.groups[0].options[0].bytes * left / 1841)
    assert after.kl([3, 4, 3]) == pytest.approx(0.5 * found.kl_after_trial([3, 4, 3]))
