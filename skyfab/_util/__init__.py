"""Small helpers for all parts of skyfab: atomic writes, scripts, sizes, TOML, versions, tables in notebooks."""
