"""Containers for tests: an image made of Debian's packages, once for each machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stage.podman import podman

from tools import container_image

BARE = f"{container_image.IMAGE}-bare"
"""The same without sshd."""


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """podman, configured for small machines."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in container_image.configure(tmp_path_factory.mktemp("podman")).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def image(engine: None) -> str:
    """Debian with sshd and Python, and a variable of the image's own."""
    try:
        return container_image.make()
    except container_image.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def bare_image(image: str) -> str:
    """The same without sshd."""
    if podman("images", "-q", BARE).strip() == "":
        purge = "export DEBIAN_FRONTEND=noninteractive; apt-get -qq purge -y openssh-server; rm -rf /etc/ssh"
        podman("run", "--name=skyfab-tests-bare", image, "sh", "-c", purge)
        podman("commit", "skyfab-tests-bare", BARE)
        podman("rm", "skyfab-tests-bare")
    return BARE
