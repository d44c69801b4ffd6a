"""Pages to look at: runs, finished or not, side by side, and plans, as HTML files that need nothing beside them."""
