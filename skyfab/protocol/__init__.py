"""What this machine and a host share, and all they share.

`frames` cuts the byte stream, `streams` runs many streams over one connection and survives
its loss, `messages` names what is said, `codec` pickles user data, `blobs` names content.
Standard library and cloudpickle only: hosts import it.
"""

VERSION = 1
"""Raised when an older side could not understand a newer one."""
