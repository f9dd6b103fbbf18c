"""Fits a polynomial: python main.py model=parabola lr=0.05, or for several, python main.py -m lr=0.1,0.01"""

import json
import logging
from pathlib import Path

import hydra
import numpy as np
from fitting import fit
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    rng = np.random.default_rng(cfg.seed)
    x = rng.uniform(-1, 1, 200)
    y = 3 * x**2 - x + 0.5
    weights, losses = fit(x, y, cfg.model.degree, steps=cfg.steps, lr=cfg.lr)
    log.info("%s: loss %.4f -> %.4f", cfg.model.name, losses[0], losses[-1])
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / "result.json").write_text(json.dumps({"weights": weights, "losses": losses, "lr": cfg.lr}))
    np.save("last.npy", np.array(weights))  # in the working folder, which is not hydra's own


if __name__ == "__main__":
    main()
