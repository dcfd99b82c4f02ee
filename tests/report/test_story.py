"""The story of a run."""

from nereus.report.story import MOST_ENTRIES, group_warnings, summarize_in_words, tell_story, transition_share
from tests.report.sample_run import SampleRun


def test_the_story_is_told_in_order():
    run = SampleRun()
    entries, left_out = tell_story(run.metrics, run.decisions, run.transitions)
    assert [(entry.step, entry.kind) for entry in entries] == [
        (0, "start"), (5, "refuse"), (7, "admit"), (7, "undone"), (8, "retry"), (10, "devices"), (10, "urgent"),
        (14, "keep"), (17, "devices"), (17, "refuse"), (19, "admit"), (24, "urgent"), (26, "warning"), (27, "end"),
    ]  # fmt: skip
    assert left_out == 0
    texts = {entry.step: entry for entry in entries if entry.kind in ("urgent", "retry")}
    assert texts[24].detail.startswith("Change 5: actor.training, critic.training 1x1x2 on 0,1 -> 1x2x1 on 0,1; the")
    assert "the move took 0.34 s; the next step took 4.62 s (-6%)" in texts[24].detail
    assert texts[8].text.startswith("Change 2. Tried again: actor.generation")


def test_a_change_that_took_a_way_through_the_last_commit_says_why():
    run = SampleRun()
    line = dict(run.transitions[2], outcome="recovered", in_force="to", reason="device 0 was lost")
    entries, _ = tell_story(run.metrics, run.decisions, [*run.transitions[:2], line])
    texts = [entry.text for entry in entries if entry.step == 10 and "device 0 was lost" in entry.text]
    assert len(texts) == 1 and "undone" not in texts[0]


def test_of_a_long_story_what_matters_is_kept():
    run = SampleRun()
    keeps = [dict(run.decisions[3], step=step) for step in range(100)]
    entries, left_out = tell_story(run.metrics, [*run.decisions, *keeps], run.transitions)
    assert len(entries) == MOST_ENTRIES + 2 and left_out == 112 - MOST_ENTRIES
    assert [entry.kind for entry in entries if entry.kind in ("urgent", "admit", "refuse", "undone")] == [
        "refuse", "admit", "undone", "urgent", "refuse", "admit", "urgent"
    ]  # fmt: skip
    many = [dict(run.decisions[2], step=step) for step in range(100)]
    assert len(tell_story(run.metrics, many, [])[0]) == MOST_ENTRIES + 2


def test_devices_that_come_are_told_from_those_that_come_back():
    def line(step: int, devices: list[int]) -> dict:
        return {"step": step, "devices_present": devices, "plan": {}, "seconds": {"total": 1.0}}

    present = [0, 1], [1], [0, 1, 2], [0, 1, 2], [2, 3], [1, 2], [1, 2, 3]
    entries, _ = tell_story([line(step, devices) for step, devices in enumerate(present)])
    assert [entry.text for entry in entries if entry.kind == "devices"] == [
        "Device 0 left: 1 device now.",
        "Devices 0, 2 came: 3 devices now.",
        "Devices 0-1 left and device 3 came: 2 devices now.",
        "Device 3 left and device 1 came back: 2 devices now.",
        "Device 3 came back: 3 devices now.",
    ]


def test_the_same_warning_is_told_once():
    newest = {"step": 13, "warnings": ["70% at the cap", "KL"]}
    history = [{"step": 3, "warnings": ["60% at the cap"]}, {"step": 4}, newest]
    assert group_warnings(history) == [([3, 13], "70% at the cap"), ([13], "KL")]


def test_a_run_that_never_changed_is_told_shortly():
    history = SampleRun().metrics[:3]
    assert summarize_in_words(history, []) == "3 steps on 2 devices."
    assert [entry.kind for entry in tell_story(history)[0]] == ["start", "end"]
    assert tell_story([]) == ([], 0) and transition_share([]) == 0
