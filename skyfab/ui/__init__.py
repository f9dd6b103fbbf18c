"""Events of a pool, and the views that show them on a terminal or as plain lines."""
