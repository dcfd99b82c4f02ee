"""The controller against tables of latencies and prices: what it does at each kind of boundary, by policy."""

from dataclasses import dataclass, field, replace

import pytest

from nereus.catalog import cluster_preset
from nereus.controller.controller import Controller, Settings
from nereus.controller.decision import Boundary, Candidate, NoPlanError
from nereus.controller.monitor import Signals
from nereus.cost.efficiency import CONSERVATIVE
from nereus.cost.load import StepLoad
from nereus.layout import Layout
from nereus.plan import Plan, StagePlan
from nereus.transition.price import TransitionPrice


def plan(tp: int, dp: int) -> Plan:
    """A plan on devices 0 .. tp * dp - 1."""
    return Plan.of({"actor.training": StagePlan(dp, Layout(tp, 1), tuple(range(tp * dp)), 1)})


@dataclass
class Tables:
    """Planning from tables by (tp, dp): latencies in s; what isn't in them doesn't fit. Prices by target.

    `micro_batch` is the largest that fits.
    """

    latency_s: dict[tuple[int, int], float]
    price_s: dict[tuple[int, int], float] = field(default_factory=dict)
    micro_batch: int = 8

    def _candidates(self, boundary: Boundary, tp: int | None = None) -> list[Candidate]:
        num_devices = len(boundary.cluster.devices)
        found = [
            Candidate(plan(*key), seconds)
            for key, seconds in self.latency_s.items()
            if key[0] * key[1] <= num_devices and tp in (None, key[0])
        ]
        return sorted(found, key=lambda candidate: candidate.latency_s)

    def search(self, boundary, efficiencies, current):
        return self._candidates(boundary)

    def scale(self, boundary, efficiencies, current):
        return self._candidates(boundary, current["actor.training"].layout.tp)

    def refit(self, boundary, efficiencies, plan):
        stage = plan["actor.training"]
        seconds = self.latency_s.get((stage.layout.tp, stage.dp))
        if seconds is None:
            return None
        return Candidate(
            plan.with_stage("actor.training", micro_batch=min(stage.micro_batch, self.micro_batch)), seconds
        )

    def fits(self, boundary, plan):
        return plan["actor.training"].micro_batch <= self.micro_batch

    def price(self, boundary, efficiencies, current, target):
        stage = target["actor.training"]
        seconds = self.price_s.get((stage.layout.tp, stage.dp), 1.0)
        return TransitionPrice(seconds, 10 * seconds)


def boundary(step: int, devices: int, tokens: float | None = None, lost: frozenset[int] = frozenset()) -> Boundary:
    cluster = cluster_preset("a100-64gb-hdr", devices)
    return Boundary(step, cluster, StepLoad(64, 2, 100, 200, 230), 230, Signals(response_tokens=tokens), lost)


def controller(tables: Tables, policy: str, start: tuple[int, int] = (1, 4), gamma: float = 0.5) -> Controller:
    return Controller(plan(*start), tables, Settings(policy, gamma))


def test_without_a_trigger_nothing_is_weighed():
    one = controller(Tables({(1, 4): 100, (2, 2): 1}), "payback")
    assert one.decide(boundary(0, 4), CONSERVATIVE) is None
    assert one.decisions == []


def test_a_better_plan_is_admitted_when_it_pays_back():
    one = controller(Tables({(1, 4): 100, (1, 8): 60}, {(1, 8): 19}), "payback")
    one.decide(boundary(0, 4), CONSERVATIVE)
    decision = one.decide(boundary(1, 8), CONSERVATIVE)
    assert decision is not None and decision.verdict == "admit" and decision.moves
    assert one.plan == plan(1, 8)
    assert (decision.latency_current_s, decision.latency_candidate_s, decision.payback_steps) == (100, 60, 19 / 40)
    assert decision.to_record()["transition_s"] == {"direct": 19, "staged": 190}
    assert "pays back in 0.47 steps" in decision.reason


def test_a_plan_that_does_not_pay_back_is_refused_and_references_are_reset():
    one = controller(Tables({(1, 4): 100, (2, 2): 60}, {(2, 2): 21}), "payback")
    one.decide(boundary(0, 4, tokens=100), CONSERVATIVE)
    decision = one.decide(boundary(1, 4, tokens=140), CONSERVATIVE)
    assert decision is not None and decision.verdict == "refuse" and not decision.moves
    assert one.plan == plan(1, 4)
    assert one.decide(boundary(2, 4, tokens=140), CONSERVATIVE) is None


def test_the_cheaper_second_best_is_taken_when_the_best_is_refused():
    one = controller(Tables({(1, 4): 100, (2, 2): 60, (4, 1): 70}, {(2, 2): 21, (4, 1): 2}), "payback")
    one.decide(boundary(0, 4, tokens=100), CONSERVATIVE)
    decision = one.decide(boundary(1, 4, tokens=140), CONSERVATIVE)
    assert decision is not None and decision.verdict == "admit"
    assert one.plan == plan(4, 1)


def test_the_best_plan_in_force_is_kept():
    one = controller(Tables({(1, 4): 100, (2, 2): 160}), "payback")
    one.decide(boundary(0, 4), CONSERVATIVE)
    decision = one.decide(boundary(1, 5), CONSERVATIVE)
    assert decision is not None and decision.verdict == "keep"
    assert decision.to_record()["payback_steps"] is None


@pytest.mark.parametrize("policy", ["payback", "any_gain", "every_k", "fixed"])
def test_a_plan_whose_devices_are_gone_is_left_at_once_by_every_policy(policy: str):
    one = controller(Tables({(1, 4): 100, (1, 2): 900}, {(1, 2): 1e6}), policy, gamma=0.0)
    one.decide(boundary(0, 4), CONSERVATIVE)
    decision = one.decide(boundary(1, 2), CONSERVATIVE)
    assert decision is not None and decision.verdict == "urgent" and decision.moves
    assert one.plan == plan(1, 2)


def test_a_plan_that_no_longer_fits_is_left_although_its_devices_are_there():
    tables = Tables({(1, 4): 100, (2, 2): 120})
    one = controller(tables, "payback")
    one.decide(boundary(0, 4), CONSERVATIVE)
    del tables.latency_s[1, 4]
    decision = one.decide(boundary(1, 4), CONSERVATIVE)
    assert decision is not None and decision.verdict == "urgent"
    assert "no longer fits memory" in decision.reason


def test_a_device_whose_memory_is_gone_makes_the_move_urgent():
    one = controller(Tables({(1, 4): 100, (1, 2): 200}), "payback")
    one.decide(boundary(0, 4), CONSERVATIVE)
    decision = one.decide(boundary(1, 4, lost=frozenset({1})), CONSERVATIVE)
    assert decision is not None and decision.verdict == "urgent"


def test_fixed_scales_dp_and_never_changes_tp():
    one = controller(Tables({(1, 4): 100, (2, 2): 10, (1, 8): 60, (2, 4): 5}), "fixed")
    one.decide(boundary(0, 4, tokens=100), CONSERVATIVE)
    assert one.decide(boundary(1, 4, tokens=200), CONSERVATIVE) is None
    one.decide(boundary(2, 8, tokens=200), CONSERVATIVE)
    assert one.plan == plan(1, 8)


def test_a_policy_without_a_plan_says_so():
    one = controller(Tables({(1, 4): 100, (2, 1): 10}), "fixed")
    one.decide(boundary(0, 4), CONSERVATIVE)
    with pytest.raises(NoPlanError, match="first tp and pp fits the 2 devices at step 1"):
        one.decide(boundary(1, 2), CONSERVATIVE)


def test_a_job_under_fixed_gives_its_layout_up_only_where_it_must():
    tables = Tables({(2, 2): 10, (1, 4): 50, (1, 2): 90})
    one = Controller(plan(2, 2), tables, Settings("fixed", may_change_layouts=True))
    one.decide(boundary(0, 4), CONSERVATIVE)
    decision = one.decide(boundary(1, 2), CONSERVATIVE)  # neither (2, 2) nor (2, 1) runs on two devices
    assert decision is not None and decision.verdict == "urgent" and one.plan == plan(1, 2)
    one.decide(boundary(2, 4), CONSERVATIVE)
    assert one.plan == plan(1, 4)  # though (2, 2) is faster


def test_every_k_looks_up_at_multiples_of_k_only():
    one = controller(Tables({(1, 4): 100, (2, 2): 99}, {(2, 2): 1e6}), "every_k")
    for step in (0, 1, 2):
        assert one.decide(boundary(step, 4, tokens=100 * (step + 1)), CONSERVATIVE) is None
    decision = one.decide(boundary(3, 4, tokens=400), CONSERVATIVE)
    assert decision is not None and decision.verdict == "admit"


def test_gamma_0_moves_only_when_it_must():
    one = controller(Tables({(1, 4): 100, (1, 8): 1}, {(1, 8): 0.001}), "payback", gamma=0.0)
    one.decide(boundary(0, 4), CONSERVATIVE)
    decision = one.decide(boundary(1, 8), CONSERVATIVE)
    assert decision is not None and decision.verdict == "refuse"


def test_measured_numbers_join_the_record_of_the_last_decision():
    one = controller(Tables({(1, 4): 100, (1, 8): 60}), "any_gain")
    one.decide(boundary(0, 4), CONSERVATIVE)
    one.decide(boundary(1, 8), CONSERVATIVE)
    one.note_transition(1.5)
    one.note_step(1, 61.0)
    one.note_step(2, 70.0)
    assert one.decisions[-1].to_record()["measured"] == {"transition_s": 1.5, "latency_s": 61.0}


def test_a_record_brings_plan_and_references_back():
    tables = Tables({(1, 4): 100, (1, 8): 60})
    one = controller(tables, "payback")
    one.decide(boundary(0, 4, tokens=100), CONSERVATIVE)
    one.decide(boundary(1, 8, tokens=100), CONSERVATIVE)
    again = Controller.from_record(one.to_record(), tables, Settings("payback"))
    assert again.plan == one.plan and again.to_record() == one.to_record()


@pytest.mark.parametrize(("policy", "gamma"), [("lucky", 0.5), ("payback", 1.5), ("payback", -0.1)])
def test_settings_are_checked(policy: str, gamma: float):
    with pytest.raises(ValueError, match="choose"):
        Settings(policy, gamma)


def test_a_plan_that_must_shrink_its_micro_batches_is_weighed_anew():
    tables = Tables({(1, 4): 100, (2, 2): 60})
    one = controller(tables, "payback")
    one.plan = one.plan.with_stage("actor.training", micro_batch=4)
    assert one.decide(boundary(0, 4), CONSERVATIVE) is None
    tables.micro_batch = 2
    decision = one.decide(boundary(1, 4), CONSERVATIVE)
    assert decision is not None and (decision.verdict, decision.trigger) == ("admit", ("memory violation",))


def test_other_settings_are_no_violation_where_those_in_force_fit():
    tables = Tables({(1, 4): 100, (2, 2): 60})
    one = controller(tables, "payback")
    one.plan = one.plan.with_stage("actor.training", micro_batch=4)
    tables.micro_batch = 2
    tables.fits = lambda *_: True  # type: ignore[method-assign]
    assert one.decide(boundary(0, 4), CONSERVATIVE) is None


def test_what_a_step_has_chosen_for_its_own_lengths_is_no_violation_at_the_next_boundary():
    one = controller(Tables({(1, 4): 100, (2, 2): 60}, micro_batch=2), "payback")
    one.plan = one.plan.with_stage("actor.training", micro_batch=2)
    for step in range(3):
        assert one.decide(boundary(step, 4), CONSERVATIVE) is None
        one.plan = one.plan.with_stage("actor.training", micro_batch=4)  # short responses were drawn


def test_urgent_replans_have_a_horizon_of_their_own():
    tables = Tables({(1, 4): 100, (1, 2): 200})
    one = controller(tables, "payback")
    one.decide(boundary(0, 4), CONSERVATIVE)
    for step in (10, 30):
        del tables.latency_s[1, one.plan["actor.training"].dp]
        tables.latency_s[1, 4 if one.plan["actor.training"].dp == 2 else 2] = 100
        decision = one.decide(boundary(step, 4), CONSERVATIVE)
        assert decision is not None and decision.trigger == ("memory violation",)
    assert decision.horizon_steps == 20


def test_a_boundary_that_found_no_plan_is_seen_the_same_again():
    tables = Tables({(1, 4): 100})
    one = controller(tables, "payback")
    one.decide(boundary(0, 4, tokens=100), CONSERVATIVE)
    before = one.to_record()
    with pytest.raises(NoPlanError):
        one.decide(boundary(1, 2, tokens=200), CONSERVATIVE)
    assert one.to_record() == before


def test_free_memory_of_the_plan_before_is_no_reference_after_a_move():
    one = controller(Tables({(1, 4): 100, (2, 2): 1}), "payback")

    def look(step: int, tokens: float, free: float):
        return replace(boundary(step, 4), signals=Signals(response_tokens=tokens, free_memory_bytes=free))

    one.decide(look(0, 100, 100.0), CONSERVATIVE)
    decision = one.decide(look(1, 200, 100.0), CONSERVATIVE)
    assert decision is not None and decision.moves
    assert one.decide(look(2, 200, 50.0), CONSERVATIVE) is None
    again = one.decide(look(3, 200, 20.0), CONSERVATIVE)
    assert again is not None and again.trigger == ("free memory",)


def test_a_disabled_controller_keeps_its_plan_until_its_devices_are_gone():
    one = Controller(plan(1, 4), Tables({(1, 4): 100, (1, 8): 1, (1, 2): 1}), Settings(enabled=False))
    for step, devices in enumerate((4, 8)):
        assert one.decide(boundary(step, devices, tokens=100 * (step + 1)), CONSERVATIVE) is None
        assert one.plan == plan(1, 4)
    with pytest.raises(NoPlanError, match=r"adapt.enabled is false"):
        one.decide(boundary(2, 2), CONSERVATIVE)
