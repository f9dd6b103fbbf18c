"""joblib and scikit-learn on hosts: python examples/grid_search.py [node1,node2]

This machine needs both too: uv pip install joblib scikit-learn
"""

import sys

from joblib import Parallel, delayed
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import skyfab as sky


def average(row):
    return float(row.mean())


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    images, digits = load_digits(return_X_y=True)
    train, test, train_digits, test_digits = train_test_split(images, digits, random_state=0)
    grid = {"svc__C": [0.1, 1, 10], "svc__gamma": ["scale", 0.001]}
    with sky.Compute(hosts, slots=2, plugins=[sky.plugins.joblib()]):
        print(len(Parallel(n_jobs=-1)(delayed(average)(row) for row in images)), "averages")
        search = GridSearchCV(make_pipeline(StandardScaler(), SVC()), grid, cv=3, n_jobs=-1)
        search.fit(train, train_digits)
    print(search.best_params_, f"{search.score(test, test_digits):.0%} of the digits are right")
