from estimate_helper import inside

import skyfab as sky

if __name__ == "__main__":
    with sky.Compute("node1,node2", ui="none") as compute:
        hits = compute.map(sky.function(inside), [1000] * 4, range(4))
        print(4 * sum(hits) / 4000)
