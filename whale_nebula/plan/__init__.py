"""The public plan: its records, texts and pages, estimates of its times, and differences between two."""
