"""Plugins: set up a framework (PyTorch, JAX …) before a function runs: its packages, settings and process group."""

from collections.abc import Callable
from typing import Final

# A plugin is a module with a class, or a function that makes it, and a line here. These replace the modules, which can
# only be imported by `from … import`. All are imported here: one that is imported later would replace its class.
from skyfab.plugins.accelerate import Accelerate as accelerate
from skyfab.plugins.base import Plugin
from skyfab.plugins.dask import Dask as dask
from skyfab.plugins.huggingface import HuggingFace as huggingface
from skyfab.plugins.jax import Jax as jax
from skyfab.plugins.joblib import Joblib as joblib
from skyfab.plugins.keras import Keras as keras
from skyfab.plugins.ray import ray
from skyfab.plugins.torch import torch

__all__ = ["Plugin", "accelerate", "dask", "huggingface", "jax", "joblib", "keras", "ray", "torch"]
REGISTRY: Final[dict[str, Callable[..., Plugin]]] = {name: globals()[name] for name in __all__ if name != "Plugin"}
"""All plugins by name: those that `skyfab run --with-plugin=NAME` finds."""
