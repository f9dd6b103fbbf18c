import skyfab as sky


@sky.function
def train(epochs: int, lr: float) -> dict:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    info = sky.instance_info()
    torch.manual_seed(0)
    x = torch.randn(400, 10)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(sums)
        if info.is_head:
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}")
    return {"node": info.node, "head": info.is_head, "loss": float(sums[0] / sums[1])}


if __name__ == "__main__":
    with sky.Compute("lab", nodes=2, plugins=[sky.plugins.torch()]) as compute:
        for result in train(epochs=4, lr=0.02) @ compute:
            print(f"node {result['node']} {'head' if result['head'] else 'worker'}: loss {result['loss']:.4f}")
