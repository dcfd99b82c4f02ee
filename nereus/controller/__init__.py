"""Monitor, replan, admit: what the job does about drift. No I/O and no clock; an executor, real or simulated, acts."""
