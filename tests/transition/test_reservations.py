"""Bytes of single primitives, by hand: what units hold, and buffers on both sides."""

from dataclasses import replace

from nereus.cost.memory import USABLE_SHARE, Workload, estimate_memory
from nereus.layout import Layout
from nereus.model.spec import num_parameters
from nereus.plan import MODEL_STAGES, Plan
from nereus.transition.graph import plan_transition
from nereus.transition.memory import TransitionMemory, format_bytes, resident_bytes
from nereus.transition.primitives import Reservation
from tests.transition.cases import BUFFER_BYTES, SPECS, WORKLOAD, memory_for, memory_of, stage

TRAINING = "actor.training"
STATE = 12 * num_parameters(SPECS[TRAINING])


def graph_of(before, after, room=10**7, **options):
    current, target = Plan.of({TRAINING: before}), Plan.of({TRAINING: after})
    return plan_transition(current, target, memory_for(current, target, room), **options)


def test_an_extension_has_buckets_on_both_sides():
    (extend,) = graph_of(stage(1, 1, 1), stage(2, 1, 1)).primitives
    assert extend.bytes == STATE
    assert extend.memory == {0: Reservation(BUFFER_BYTES, 0), 1: Reservation(STATE + BUFFER_BYTES, STATE)}


def test_a_restore_has_the_readers_buffer():
    graph = graph_of(stage(1, 1, 1), stage(2, 1, 1), transport="staged")
    write, restore = graph.primitives
    assert (write.bytes, restore.bytes) == (STATE, STATE) and restore.streams == (write.id,)
    assert write.memory == {}  # the writer's buffers are counted with what the worker itself needs
    assert restore.memory == {1: Reservation(STATE + BUFFER_BYTES, STATE)}


def test_buckets_are_no_larger_than_what_travels():
    current, target = Plan.of({TRAINING: stage(1, 1, 1)}), Plan.of({TRAINING: stage(2, 1, 1)})
    memory = replace(memory_for(current, target, 10**7), transfer_buffer_bytes=10**9)
    (extend,) = plan_transition(current, target, memory).primitives
    assert extend.memory[1] == Reservation(2 * STATE, STATE)


def test_a_split_keeps_the_old_unit_beside_until_the_commit():
    split, destroy = graph_of(stage(1, 2, 1), stage(2, 1, 1)).primitives
    assert split.memory[0] == Reservation(STATE + 2 * BUFFER_BYTES, STATE)
    half = memory_of({}).held(TRAINING, Layout(2, 1))[0]
    assert destroy.memory == {0: Reservation(0, -half), 1: Reservation(0, -half)}
    assert destroy.after_commit


def test_devices_have_what_the_memory_model_leaves():
    """Residents and the fixed part are those of the memory model, so both say the same of a plan at rest."""
    workload = Workload(8, 1, 4, 4)
    plan = Plan.of({name: stage(2, 2, 1) for name in MODEL_STAGES})
    capacities = dict.fromkeys(range(4), 2**30)
    memory = TransitionMemory.of(SPECS, workload, "bfloat16", capacities)
    held = resident_bytes(plan, memory, plan.devices)
    assert workload == WORKLOAD
    for device, peak in estimate_memory(plan, SPECS, workload, "bfloat16").items():
        fixed = int(USABLE_SHARE * capacities[device]) - memory.usable_bytes[device]
        assert held[device] + fixed <= peak.total < held[device] + fixed + 2**20
    assert memory.takes(plan)
    assert not replace(memory, usable_bytes={d: held[d] for d in held}).takes(plan)
    assert not TransitionMemory.of(SPECS, workload, "bfloat16", dict.fromkeys(range(4), 2**22)).takes(plan)


def test_sizes_for_people():
    assert [format_bytes(n) for n in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2.00 KiB", "3.00 MiB", "5.00 GiB"]
