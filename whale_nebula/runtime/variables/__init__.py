"""Variables in several processes: ownership, and collective reads."""
