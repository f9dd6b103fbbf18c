"""The wire protocol between client and agent: framing, multiplexing, messages, serialization.

`frames` splits the byte stream, `mux` runs many streams over one connection and resumes after a reconnect, `messages`
defines the messages, `codec` pickles user data, `blobs` names content by its sha256. Hosts import this package, so it
depends only on the standard library and cloudpickle.
"""

VERSION = 1
"""Protocol version. Increase it when an older peer could not understand a newer one."""
NO_AGENT = 69
"""The exit code of a link whose agent is gone from the host (EX_UNAVAILABLE)."""
