import skyfab as sky


@sky.function
def digest(chunk: int) -> dict:
    import hashlib

    text = b""
    for number in range(20_000):
        text = hashlib.sha256(text + f"{chunk} {number}".encode()).digest()
    return {"chunk": chunk, "node": sky.instance_info().node, "digest": text.hex()[:8]}


if __name__ == "__main__":
    with sky.Compute("lab", nodes=4) as compute:
        results = sky.gather(*(digest(chunk) for chunk in range(8))) >> compute
    print("chunks:", [result["chunk"] for result in results])
    print("different:", len({result["digest"] for result in results}))
    print("nodes:", len({result["node"] for result in results}))
