"""The clean loop: plain PyTorch, all tensors in memory, nothing but the training itself."""

import time

import torch
import torch.nn.functional as F
import workload
from torch import Tensor


def play_round(
    nets: list[workload.Cnn], server: dict[str, Tensor], x: Tensor, y: Tensor, prototypes: Tensor | None
) -> dict[str, Tensor]:
    """Train every client from the server's model and return the mean; with prototypes, pull the embeddings there."""
    total = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
    for net, images, labels in zip(nets, x, y, strict=True):
        net.load_state_dict(server)
        optimizer = torch.optim.SGD(net.parameters(), lr=workload.LR, momentum=workload.MOMENTUM)
        for index in torch.split(torch.randperm(len(labels)), workload.BATCH):
            optimizer.zero_grad()
            embedding = net.body(images[index])
            loss = F.cross_entropy(net.head(embedding), labels[index])
            if prototypes is not None:
                loss = loss + F.mse_loss(embedding, prototypes[labels[index]])
            torch.autograd.backward(loss)
            optimizer.step()
        for name, tensor in net.state_dict().items():
            total[name] += tensor / len(nets)
    return total


def main(method: str, rounds: str) -> None:
    torch.manual_seed(0)
    x, y = workload.tensors()
    nets = [workload.Cnn() for _ in x]
    server = {name: tensor.clone() for name, tensor in nets[0].state_dict().items()}
    prototypes = torch.rand(workload.CLASSES, 50) if method == "fedproto" else None
    seconds = []
    for _ in range(int(rounds)):
        began = time.perf_counter()
        server = play_round(nets, server, x, y, prototypes)
        seconds.append(time.perf_counter() - began)
    workload.report(seconds, torch.__version__)
