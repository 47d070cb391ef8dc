"""A plan as one HTML file: a graph to move about in, the schedule, the layers of each stage, tables.

Everything is drawn here, in Python, as SVG and tables; the script in the page only lets a reader move, point and open.
So the page says all it has to say without the script, too, and it needs no network and no other program.
"""

from whale_nebula.plan.html.document import plan_html

__all__ = ["plan_html"]
