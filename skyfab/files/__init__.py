"""Files and folders to hosts and back: compared by content, packed, resumable.

A `Source` reads files and a `Target` writes them; `transfer` moves what differs from one to the other. One of the two
is on this machine. The other one is in a worker process on the host, and is asked with calls (`host.ask.files`), so it
has the pool's stream, its flow control and its working folder. `entries`, `source`, `target` and `draft` run on
hosts, with the standard library alone. `entries.walk` also lists the modules and includes of a project (`calls`).
"""
