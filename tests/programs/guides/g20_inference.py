import skyfab as sky


@sky.function
def classify(texts: list[str]) -> dict:
    import torch
    from transformers import pipeline

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    classifier = pipeline("sentiment-analysis", model="trained", device=device)
    info = sky.instance_info()
    return {"found": classifier(texts), "node": info.node, "accelerators": info.accelerators}


if __name__ == "__main__":
    texts = ["good film", "poor plot"]
    image = sky.Image(pip=["transformers", "datasets", "accelerate", "torch"])
    with sky.Compute("node1", image=image) as compute:
        result = classify(texts) >> compute
    for text, found in zip(texts, result["found"]):
        print(f"{text}: {found['label']}")
