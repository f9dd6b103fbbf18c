"""Plugins: what frameworks need before a function's first line."""
