"""Plots and the HTML report of a run."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nereus.config import dump_config, load_config
from nereus.report.html import write_report
from nereus.report.pictures import draw_run_pngs
from nereus.report.plots import draw_seconds
from nereus.report.summary import summarize
from tests.report.sample_run import SampleRun


def metrics_line(step: int) -> dict:
    return {
        "step": step, "policy_version": 2 * step, "reward_mean": 0.1 * step, "reward_std": 0.05, "kl_k1": 0.01,
        "kl_k3": 0.012, "response_tokens_mean": 10.0 + step, "response_tokens_p95": 30.0, "rollout_tokens": 320,
        "plan": {"actor.training": {"dp": 2, "tp": 1, "pp": 1, "devices": [0, 1], "micro_batch": 4}},
        "seconds": {"generation": 0.5, "training": 0.4, "orchestration": 0.1, "transition": 0.0, "total": 1.0},
    }  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "amber"
    folder.mkdir()
    (folder / "run.yaml").write_text(dump_config(load_config("tiny-cpu")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metrics_line(step)) + "\n" for step in range(8)))
    return folder


class Outside(HTMLParser):
    """Collects everything that a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [f"{tag} {value}" for name, value in attrs if name in ("src", "href") and value]
        self.found += [tag] if tag in ("script", "link", "iframe") else []


def test_one_file_holds_everything(run_dir: Path):
    path = write_report(str(run_dir))
    page = Path(path).read_text()
    assert path == f"{run_dir}/report.html"
    outside = Outside()
    outside.feed(page)
    assert outside.tags.count("figure") == outside.tags.count("svg") == 4
    assert outside.tags.count("svg") == page.count("aria-label=")
    assert "Plan changes" not in page and "Decisions" not in page
    assert not outside.found
    for text in ("amber", "actor.training", "prompts_per_step", "0.150 → 0.550", "8 steps"):
        assert text in page


def test_a_run_that_adapts_is_told_from_top_to_bottom(tmp_path: Path):
    page = Path(write_report(str(SampleRun().write(tmp_path / "amber")))).read_text()
    outside = Outside()
    outside.feed(page)
    assert outside.tags.count("figure") == outside.tags.count("svg") == 6 and not outside.found
    story = ["28 steps on 1 to 2 devices. The plan changed 4 times", "61% of the responses end at the cap",
             "What happened", "The run begins on 2 devices", "the move takes 1.2 s", "undone: the old plan holds",
             "Tried again", "Device 1 left", "needs devices that are gone", "Device 1 came back",
             "no longer fits memory, so the job goes on", "Plans over the steps", "What was learned",
             "What the plans took", "(predicted)", "Against the first plan", "<h2>Decisions</h2>",
             "<td>5.22 s (-2%)</td>", "<h2>Plan changes</h2>", "<h2>Config</h2>"]  # fmt: skip
    at = [page.index(text) for text in story]
    assert at == sorted(at)


def test_the_page_of_a_long_run_stays_small(tmp_path: Path):
    run = SampleRun(stretch=36)
    run.decisions = [dict(record, step=step) for step in range(1000) for record in run.decisions[:1]]
    run.transitions = [dict(run.transitions[0], step=step) for step in range(1000)]
    path = Path(write_report(str(run.write(tmp_path / "amber"))))
    page = path.read_text()
    assert path.stat().st_size < 2e6
    assert "100 of 1000 decisions are shown" in page and "200 of 1000 changes are shown" in page
    assert "1008 steps, one in 3 shown" in page and "1963 more that mattered less" in page


def test_changes_of_the_plan_are_listed(run_dir: Path):
    old = {"actor.training": {**metrics_line(0)["plan"]["actor.training"], "recompute": False}}
    new = {"actor.training": {**old["actor.training"], "dp": 1, "tp": 2}}
    line = {"step": 3, "from": old, "to": new, "primitives": [], "seconds": 0.82, "bytes": 3 << 20}
    lines = [{**line, "outcome": "rolled_back"}, {**line, "step": 4, "outcome": "committed"}]
    (run_dir / "transitions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Path(write_report(str(run_dir))).read_text()
    assert "<td>4</td><td>actor.training 2x1x1 on 0,1 -&gt; 1x2x1 on 0,1</td>" in page
    assert "3.00 MiB in 0.82 s, undone: the old plan holds" in page and "3.00 MiB in 0.82 s, committed" in page


def test_a_run_name_is_text_not_markup(run_dir: Path):
    (run_dir / "metrics.jsonl").unlink()
    run_dir = run_dir.rename(run_dir.with_name("<script>x"))
    assert "<script>" not in Path(write_report(str(run_dir))).read_text()


def test_a_run_without_steps_has_a_report_too(run_dir: Path):
    (run_dir / "metrics.jsonl").unlink()
    assert "No step has ended yet" in Path(write_report(str(run_dir))).read_text()


def test_a_directory_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds no run .*; give the directory of a run"):
        write_report(str(tmp_path))


def test_a_report_that_cannot_be_written_is_one_sentence(run_dir: Path):
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "report.html").mkdir()
    with pytest.raises(ValueError, match=r"^RUN_DIR .*amber can't be written to \(.*\); choose another place\.$"):
        write_report(str(run_dir))


def test_summary_compares_first_and_last_steps():
    summary = summarize([metrics_line(step) for step in range(10)])
    assert summary["steps"] == 10
    assert summary["reward_first"] == pytest.approx(0.2)
    assert summary["reward_last"] == pytest.approx(0.7)
    assert summary["tokens_per_s"] == pytest.approx(320)


def test_plots_bear_missing_numbers_and_single_steps():
    line = metrics_line(0) | {"kl_k1": None}
    del line["response_tokens_p95"]
    assert all(png.startswith(b"\x89PNG") for _, png in draw_run_pngs([line]))
    assert draw_run_pngs([]) == []


def test_bars_of_a_step_end_at_its_seconds():
    (axes,) = draw_seconds([metrics_line(0), metrics_line(1)]).axes
    tops = [bar.get_y() + bar.get_height() for bar in axes.patches]
    assert max(tops) == pytest.approx(1.0)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["generation", "training", "orchestration"]
