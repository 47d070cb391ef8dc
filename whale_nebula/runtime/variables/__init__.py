"""Variables in several processes: ownership, collective reads, and checksums."""
