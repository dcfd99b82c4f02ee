"""Runtime room: worker processes, engines and communicators, and what runs inside the workers."""
