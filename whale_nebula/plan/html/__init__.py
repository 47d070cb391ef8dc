"""A plan as one HTML file: a graph to move about in, the schedule, the layers of each stage, tables.

All of it is drawn here as SVG and tables; the script in the page only lets a reader move, point and open.
"""
