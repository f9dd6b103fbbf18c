"""Python environments on hosts: probe a host, lock an image's packages for it, upload and install them."""
