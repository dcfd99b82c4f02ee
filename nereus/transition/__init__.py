"""From one plan to another: what a transition costs."""
