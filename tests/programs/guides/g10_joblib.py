from time import perf_counter, sleep

from joblib import Parallel, delayed

import skyfab as sky


def slow_task(x):
    sleep(0.5)
    return x * 2


if __name__ == "__main__":
    with sky.Compute("lab", nodes=4, slots=5, plugins=[sky.plugins.joblib()]):
        Parallel(n_jobs=-1)(delayed(slow_task)(i) for i in range(20))
        started = perf_counter()
        results = Parallel(n_jobs=-1)(delayed(slow_task)(i) for i in range(80))
        elapsed = perf_counter() - started
    print("results:", len(results), sum(results))
    print("in parallel:", elapsed < 80 * 0.5 / 4)
