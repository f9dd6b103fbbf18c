"""An Optuna study whose trials run on hosts: python examples/study.py [node1,node2]

This machine needs Optuna: uv pip install optuna
"""

import sys

import optuna

import skyfab as sky


def objective(trial):
    x = trial.suggest_float("x", -10, 10)
    for step in range(10):
        loss = (x - 2) ** 2 + 1 / (step + 1)
        trial.report(loss, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=4))
    image = sky.Image() if hosts == "local" else sky.Image(pip=["optuna"])  # `local` uses this Python
    with sky.Compute(hosts, slots=2, image=image) as compute:
        compute.study(study, objective, n_trials=40)  # with gpus=1, each trial has its own GPU
    pruned = len(study.get_trials(states=[optuna.trial.TrialState.PRUNED]))
    print(f"{len(study.trials)} trials, {pruned} pruned early; the best x is {study.best_params['x']:.1f}")
