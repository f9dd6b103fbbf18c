"""A session with one host's agent: SSH transport, shell, bootstrap, connection with heartbeats and reconnect."""
