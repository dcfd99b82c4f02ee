"""The tall picture of a run."""

from nereus.report.pictures import draw_pictures, draw_run_pngs
from nereus.report.plots import MOST_POINTS, draw_first_plan, draw_seconds, render_svg
from nereus.report.timeline import draw_timeline
from tests.report.sample_run import SampleRun


def texts_of(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_boxes_say_which_plan_and_lines_mark_its_changes():
    run = SampleRun()
    figure = draw_timeline(run.metrics, run.decisions, run.transitions)
    pool, _, plans, latency = figure.axes
    assert [label.get_text() for label in plans.get_yticklabels()] == list(run.metrics[0]["plan"])
    assert texts_of(plans)[:4] == ["2×1×1 on 0,1", "1×2×1", "1×1×1 on 0", "2×1×1 on 0,1"]
    assert len({text.get_bbox_patch().get_facecolor() for text in plans.texts}) == 3
    assert texts_of(pool) == ["1", "2", "3", "4", "5"]
    lines = [segment for collection in latency.collections for segment in collection.get_segments()]
    assert sorted(line[0][0] for line in lines) == [6.5, 7.5, 9.5, 18.5, 23.5]
    assert len({tuple(c.get_color()[0]) for c in latency.collections if len(c.get_segments())}) == 3
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "tp 1 · pp 1", "tp 1 · pp 2", "tp 2 · pp 1",
        "plan change: undone", "plan change: pays back", "plan change: urgent",
    ]  # fmt: skip


def test_a_line_with_the_least_is_drawn_too():
    assert len(draw_run_pngs([{"step": 0}])) == 4
    assert draw_timeline([{"step": 3, "plan": {}, "seconds": {}}]).axes


def test_long_runs_are_drawn_with_few_points():
    run = SampleRun(stretch=36)
    (axes,) = draw_seconds(run.metrics).axes
    assert len(axes.patches) == 7
    assert all(len(patch.get_data().values) <= MOST_POINTS for patch in axes.patches)
    # The sum of a step's parts is still the step's seconds.
    tops = axes.patches[-1].get_data()
    assert abs(tops.values[0] - sum(line["seconds"]["total"] for line in run.metrics[:5]) / 5) < 1e-9
    many = [dict(run.transitions[0], step=step) for step in range(50)]
    assert texts_of(draw_timeline(run.metrics, run.decisions, many).axes[0]) == []


def test_where_the_first_plan_cannot_run_is_shaded():
    (axes,) = draw_first_plan(SampleRun().metrics).axes
    spans = sorted((patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches)
    assert spans == [(9.5, 16.5), (20.5, 27.5)]


def test_a_picture_has_words_for_those_who_cannot_see_it():
    figure = draw_seconds(SampleRun().metrics)
    svg = render_svg(figure, 'a "b" <c> & d')
    assert svg.startswith('<svg role="img" aria-label="a &quot;b&quot; &lt;c&gt; &amp; d" ')
    assert [picture.about for picture in draw_pictures(SampleRun().metrics)] == ["plans", "cost", *["learning"] * 4]
