"""HostImages: hosts with equal images share a preparation, and which interpreter each is asked for."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import skyfab as sky
from skyfab.env.prepare import Preparation
from skyfab.pool.images import HostImages, Progress
from skyfab.ui.events import Events

HOSTS = [sky.Host(name=f"node{number}") for number in (1, 2, 3)]


class ForTwo(sky.plugins.Plugin):
    """Another image for the second host."""

    def transform(self, image: sky.Image, host: sky.Host) -> sky.Image:
        return sky.Image(pip=["b"]) if host.name == "node2" else sky.Image(pip=["a"])


def begun(hosts: list[sky.Host], image: sky.Image, *plugins: Any) -> HostImages:
    images = HostImages(hosts, image, plugins)
    images.begin(hosts)
    return images


def interpreter(host: sky.Host, image: sky.Image) -> tuple[str, bool]:
    """What a host is asked for, and whether it is prepared where it is missing."""
    python, prepare = begun([host], image).interpreter(host, "session", Progress(Events(), host.name))
    return python, prepare is not None


def test_hosts_with_equal_images_share_one_preparation() -> None:
    images = begun(HOSTS, sky.Image(), ForTwo())
    assert [images.image_of(host).pip for host in HOSTS] == [("a",), ("b",), ("a",)]
    assert images.image_of(HOSTS[0]) is images.image_of(HOSTS[2])
    first, second, third = (images._preparations[host.name] for host in HOSTS)
    assert first is third
    assert first is not second
    assert second.image is images.image_of(HOSTS[1])


def test_this_machine_runs_the_python_that_runs_here() -> None:
    here = sky.Host(name="here", transport="local")
    assert interpreter(here, sky.Image()) == (sys.executable, False)
    assert interpreter(here, sky.Image(pip=["a"]))[1]


def test_a_named_interpreter_is_used_as_it_is() -> None:
    named = sky.Host(name="node1", python="/opt/python")
    assert interpreter(HOSTS[0], sky.Image(python="/usr/bin/python3")) == ("/usr/bin/python3", False)
    assert interpreter(named, sky.Image()) == ("/opt/python", False)
    assert interpreter(named, sky.Image(python="/usr/bin/python3")) == ("/usr/bin/python3", False)
    assert interpreter(named, sky.Image(pip=["a"]))[1], "packages go into an environment"


def test_debian_packages_are_looked_for_before_an_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Preparation, "guess", lambda self, host: "env/digest/boot")
    assert interpreter(HOSTS[0], sky.Image(pip=["a"])) == ("env/digest/boot", True)
    assert interpreter(HOSTS[0], sky.Image(pip=["a"], apt=["git"])) == ("none", True)


def test_variables_of_the_pool_come_before_those_of_the_image_and_of_the_host() -> None:
    host = sky.Host(name="node1", env={"A": "host", "B": "host", "C": "host"})
    images = HostImages([host], sky.Image(env={"B": "image", "C": "image"}), (), {"C": "pool"})
    assert images.variables(host).items() >= {"A": "host", "B": "image", "C": "pool"}.items()
