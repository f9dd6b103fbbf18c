"""The host's half of the remote device, and the wire format that both halves share."""
