"""The report of a run: plots and one self-contained HTML file."""
