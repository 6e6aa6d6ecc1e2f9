"""Models that come with fedbench: each an `nn.Module` with submodules `body` and `head`."""
