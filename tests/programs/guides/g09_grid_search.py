from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import Pipeline
from sklearn.svm import SVC

import skyfab as sky

if __name__ == "__main__":
    X, y = load_digits(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=42)
    pipe = Pipeline([("clf", SVC())])
    param_grid = [
        {"clf": [RandomForestClassifier(random_state=42)], "clf__n_estimators": [10, 20], "clf__max_depth": [None, 5]},
        {"clf": [SVC()], "clf__C": [0.1, 10], "clf__kernel": ["rbf", "poly"]},
    ]
    with sky.Compute("lab", nodes=3, slots=2, plugins=[sky.plugins.joblib()]):
        search = GridSearchCV(pipe, param_grid, cv=3, scoring="accuracy", n_jobs=-1, verbose=3)
        search.fit(X_train, y_train)
    print("candidates:", len(search.cv_results_["params"]))
    print("best:", type(search.best_params_["clf"]).__name__, search.score(X_test, y_test) > 0.95)
