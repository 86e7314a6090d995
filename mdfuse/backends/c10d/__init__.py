"""torch.distributed: gloo, NCCL, UCC."""
