"""From a Program to a Plan in small steps: each takes valid data and gives valid data."""
