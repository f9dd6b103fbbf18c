"""Small things that any part of skyfab may need: scripts, sizes, TOML, tables in notebooks."""
