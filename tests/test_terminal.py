"""What a run that adapts says in the terminal."""

import io

from rich.console import Console

from nereus.progress import Event
from nereus.terminal import RunView, show_plans
from tests.report.sample_run import SampleRun


def test_decisions_and_warnings_are_told_in_words():
    run, output = SampleRun(), io.StringIO()
    # Square brackets are no markup, and a sentence is one line, however long.
    decision = run.decisions[2] | {"reason": f"{run.decisions[2]['reason']} See [red]."}
    with RunView(Console(file=output, width=60)) as view:
        view(Event("decision", "amber", 10, decision))
        view(Event("transition", "amber", 10, run.transitions[2]))
        view(Event("step", "amber", 26, run.metrics[26] | {"plan": run.transitions[2]["to"]}))
    lines = output.getvalue().splitlines()
    begin = "adapt urgent before step 10: The plan needs devices that are gone, so the job goes on with"
    assert lines[0].startswith(begin)
    assert lines[0].endswith("See [red].") and lines[1].startswith("plan  ") and lines[2].split()[0] == "26"
    assert lines[3].startswith("warn  61% of the responses end at the cap of 128 tokens") and len(lines) == 4


def test_every_plan_is_shown_with_its_prediction():
    output = io.StringIO()
    show_plans(Console(file=output, width=110), SampleRun().metrics)
    lines = output.getvalue().splitlines()
    assert lines[0].split()[-4:] == ["steps", "predicted", "measured", "error"]
    assert lines[3].split() == ["all", "model-stages", "1x1x1", "on", "0", "9", "4.57", "s", "4.76", "s", "5%"]
    assert lines[-1] == "changes of the plan took 1.6% of the time" and len(lines) == 7
