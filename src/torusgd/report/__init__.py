"""Pages to look at: finished and unfinished runs side by side, and plans, as HTML files that need nothing beside them.

Plain Python computes every point of a chart; templates of jinja2, which comes with the extra `report`, set the page.
"""
