"""Small things that any part of skyfab may need: atomic writes, scripts, sizes, TOML, versions, tables in notebooks."""
