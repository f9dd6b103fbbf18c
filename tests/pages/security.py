import skyfab as sky

model, x = {"weight": 1.0}, [2.0]


@sky.function
def train(model, x):
    return {"weight": model["weight"] * x[0]}


# after the last block
assert weights == {"weight": 2.0}
