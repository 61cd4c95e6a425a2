"""Muon for the matrices of the layers, AdamW for the rest."""
import torch


def newton_schulz(g):
    """Orthogonalise a batch of matrices with rows <= cols (five quintic steps in bf16)."""
    x = g.bfloat16()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        a = x @ x.transpose(-2, -1)
        b = -4.7750 * a + 2.0315 * (a @ a)
        x = 3.4445 * x + b @ x
    return x


class Optimizer:
    def __init__(self, params, muon, lr_muon=0.02, lr_adam=2e-3, compiled=True):
        self.muon = {k: params[k] for k in muon}
        self.buf = {k: torch.zeros_like(p) for k, p in self.muon.items()}
        self.rest = [p for k, p in params.items() if k not in muon and p.requires_grad]
        fused = self.rest[0].is_cuda
        self.adam = torch.optim.AdamW(self.rest, lr=lr_adam, betas=(0.9, 0.95), weight_decay=0.0, **({"fused": True} if fused else {}))
        self.lr_muon, self.lr_adam = lr_muon, lr_adam
        self.ns = torch.compile(newton_schulz, dynamic=False) if compiled else newton_schulz

    @torch.no_grad()
    def step(self, scale):
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        for gr in self.adam.param_groups:
            gr["lr"] = self.lr_adam * scale
        self.adam.step()
        groups = {}
        for k, p in self.muon.items():
            self.buf[k].lerp_(p.grad, 0.05)
            u = p.grad.lerp(self.buf[k], 0.95)
            r, c = u.shape[-2:]
            u = u.reshape(-1, r, c)
            groups.setdefault((min(r, c), max(r, c)), []).append((p, u.transpose(1, 2) if r > c else u, r > c))
        for items in groups.values():
            x = self.ns(torch.cat([u for _, u, _ in items]))
            at = 0
            for p, u, flip in items:
                n = u.shape[0]
                d = x[at:at + n]
                at += n
                if flip:
                    d = d.transpose(1, 2)
                r, c = p.shape[-2:]
                p.add_(d.reshape(p.shape).to(p.dtype), alpha=-self.lr_muon * scale * max(1.0, r / c) ** 0.5)
        for p in list(self.muon.values()) + self.rest:
            p.grad = None
