"""One agent on one host: transport, shell, bootstrap, connection, session."""
