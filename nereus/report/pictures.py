"""The pictures of a run, in the order in which they are read: for the report as SVG, for Prefect's UI as PNG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from nereus.report.plots import (
    draw_entropy,
    draw_first_plan,
    draw_kl,
    draw_lengths,
    draw_reward,
    render_png,
    render_svg,
)
from nereus.report.timeline import draw_timeline

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A figure with its title and how to read it; `about` is what it shows: plans, learning or cost."""

    about: str
    title: str
    note: str
    figure: Figure

    def to_svg(self) -> str:
        return render_svg(self.figure, f"{self.title}. {self.note}")


def draw_pictures(
    history: Sequence[dict[str, Any]], decisions: Sequence[Record] = (), transitions: Sequence[Record] = ()
) -> Iterator[Picture]:
    """Draw every picture of a run, one after the other; none for a run without steps."""
    if not history:
        return
    yield Picture(
        "plans",
        "Plans over the steps",
        "A box is a model-stage on one plan: dp×tp×pp on devices, coloured by tp and pp. "
        "A line through all rows is a change of the plan, numbered as in the tables below.",
        draw_timeline(history, decisions, transitions),
    )
    if any(line.get("predicted_s") for line in history):
        yield Picture(
            "cost",
            "Against the first plan",
            "What each step took, and what it would have taken on the first plan, as the cost model says that was "
            "calibrated until then.",
            draw_first_plan(history),
        )
    yield Picture("learning", "Reward", "Mean of a step's responses; the band is one standard deviation.",
                  draw_reward(history))  # fmt: skip
    yield Picture("learning", "Response length", "In tokens; the band ends at the 95th percentile.",
                  draw_lengths(history))  # fmt: skip
    yield Picture("learning", "KL to the reference", "How far the policy has moved, by two estimators.",
                  draw_kl(history))  # fmt: skip
    if any(line.get("entropy") is not None for line in history):
        yield Picture("learning", "Entropy", "How undecided the policy is about the next token.", draw_entropy(history))


def draw_run_pngs(
    history: Sequence[dict[str, Any]], decisions: Sequence[Record] = (), transitions: Sequence[Record] = ()
) -> list[tuple[str, bytes]]:
    """Return every picture of a run as (title, PNG bytes); none for a run without steps."""
    return [(picture.title, render_png(picture.figure)) for picture in draw_pictures(history, decisions, transitions)]
