"""For tests, ours and yours: links over memory that break as they are told to, failpoints, and simulated runs."""
