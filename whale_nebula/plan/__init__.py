"""A plan as users see it: its records, texts and pages, estimates of its times, and differences between two."""
